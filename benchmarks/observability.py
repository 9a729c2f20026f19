"""Measures what scrapes, the access log and traces cost a server of the echo handler.

    python -m benchmarks.observability

One server under a steady load alternates between two states: plain, and observed, in which it is scraped every second,
writes a line in JSON for each request and traces 1 % of them. Turns of a tenth of a second alternate (plain, observed,
observed, plain), so that whatever else the machine does meets both. Both states share one process, because two
processes of the same server differ: where a process has its code and data changes its speed by 3 to 10 %. Twenty turns
of each state are a pair. Each round starts the server anew. Prints the ratios of each round, and the median of all
pairs with its 95 % interval.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple
from unittest import mock

import uvloop
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from benchmarks.figures import parser_of, show
from benchmarks.raw_load import Load, Rates, echo
from benchmarks.servers import Server, model_directory, started
from frontend import server as frontend_server
from frontend.access.management_access import Access
from frontend.observability import request_log
from frontend.observability.metrics.collector import Metrics
from frontend.observability.request_reports import RequestReports
from frontend.observability.traces import spans
from frontend.relay.relay import Relay
from lmi_server.configuration.server_settings import ServerSettings, resolve_server
from lmi_server.serving.models.model_store import ModelSource
from lmi_server.serving.models.registry import ModelRegistry

CONNECTIONS, TOKENS = 64, 4
ECHO = ("option.entryPoint=djl_python.echo", "option.max_rolling_batch_size=256")
SCRAPE = b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: application/openmetrics-text;version=1.0.0\r\n\r\n"
OBSERVED = {"SERVING_ACCESS_LOG": "json", "SERVING_LOG_FORMAT": "json", "SERVING_TRACE_SAMPLE": "0.01"}
ENDPOINT = "SERVING_OTLP_TRACES_ENDPOINT"
SWITCH = signal.SIGUSR1
TURN_S = 0.095  # two observed ones follow each other, and the log is written once: five times a second, as always
TURNS = 40  # of a pair, half of them in each state
SCRAPED = (1, 21)  # turns, in the observed state
OBSERVING = threading.Event()  # in the process of the server
SETTLE_S = 0.005  # before a turn: the answers that are on their way belong to the last one


class SwitchedRelay(Relay):
    """Counts requests only, as a server without these settings does; a signal has it log and trace them, or stop it."""

    def __init__(self, models: ModelRegistry, metrics: Metrics, settings: ServerSettings, access: Access) -> None:
        super().__init__(models, metrics, settings, access)
        without = {"access_log": "off"}
        plain = RequestReports(settings.model_copy(update=without), metrics, self.error_rates)
        self._states = [plain, self.reports]
        asyncio.get_running_loop().call_soon(self._set)  # the server has its traces attached to the observed ones first
        asyncio.get_running_loop().add_signal_handler(SWITCH, self._switch)

    def _switch(self) -> None:
        self._states.reverse()
        self._set()
        if OBSERVING.is_set():
            OBSERVING.clear()
        else:
            OBSERVING.set()
            asyncio.get_running_loop().call_later(TURN_S, self.reports.flush)

    def _set(self) -> None:
        self.reports = self._states[0]


class WaitingExporter(OTLPSpanExporter):  # type: ignore[misc]  # mypy skips OpenTelemetry
    """Sends spans while the server is observed: its thread must not take time from the plain state."""

    def export(self, ended: Sequence[Any]) -> SpanExportResult:
        OBSERVING.wait(1)  # longer than a plain state lasts, but at the end
        return super().export(ended)


def serve(directory: Path, port: int, endpoint: str) -> None:
    """Serve, and have log and spans written while the server is observed, and as often as they would be then."""
    settings, _ = resolve_server({**OBSERVED, ENDPOINT: endpoint}, {"port": port, "log_level": "warning"})
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "10000"  # half of it observed
    with (
        mock.patch.object(frontend_server, "Relay", SwitchedRelay),
        mock.patch.object(request_log, "_DELAY_S", 3600.0),
        mock.patch.object(spans.trace_exporter, "OTLPSpanExporter", WaitingExporter),
    ):
        sys.exit(frontend_server.run([ModelSource(str(directory), "echo")], settings, {}))


class Collector:
    """Takes traces as a collector does, and counts their bytes; what it would do with them is not measured here."""

    def __init__(self) -> None:
        self.received = 0
        self.endpoint = ""

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/traces"
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                self.received += len(await reader.readexactly(length))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n")
        writer.close()


class Scraper:
    """Reads the metrics of a server, as Prometheus does."""

    def __init__(self, server: Server) -> None:
        self.scrapes = 0
        self._server = server

    async def scrape(self) -> None:
        await asyncio.sleep(SETTLE_S + TURN_S / 4)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        writer.write(SCRAPE)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert (await reader.readexactly(length)).endswith(b"# EOF\n"), "it is not OpenMetrics"
        self.scrapes += 1
        writer.close()


class Pair(NamedTuple):
    """The turns of both states, which took place in turns."""

    plain: Rates
    observed: Rates

    @property
    def ratio(self) -> float:
        """Requests per second, observed to plain."""
        return self.observed.requests / self.plain.requests

    @property
    def cost(self) -> float:
        """Processor time of a request, observed to plain."""
        return self.observed.cpu_s / self.observed.requests / (self.plain.cpu_s / self.plain.requests)


async def compared(server: Server, load: Load, scraper: Scraper) -> Pair:
    """Alternate between both states until each has had two seconds, with two scrapes in the observed one."""
    turns: tuple[list[Rates], list[Rates]] = [], []
    is_observed = False
    for number in range(TURNS):
        if number % 2:  # plain, observed, observed, plain: neither state comes first more often
            is_observed = not is_observed
            os.kill(server.pids()[0], SWITCH)
        scrape = scraper.scrape() if number in SCRAPED else asyncio.sleep(0)
        rates, _ = await asyncio.gather(load.measure(server, TURN_S, SETTLE_S), scrape)
        turns[is_observed].append(rates)
    return Pair(*(Rates(*map(mean, zip(*rates, strict=True))) for rates in turns))


async def alternate(server: Server, scraper: Scraper, pairs: int) -> list[Pair]:
    load = await Load.open(server, CONNECTIONS, echo(TOKENS, stream=False), stream=False)
    await asyncio.sleep(1)  # the server's first requests take longer
    measured = [await compared(server, load, scraper) for _ in range(pairs)]
    await load.close()
    return measured


async def compare(rounds: int, pairs: int) -> None:
    collector = Collector()
    measured: list[list[Pair]] = []
    scrapes = lines = 0
    async with collector.listening():
        for _ in range(rounds):
            with tempfile.NamedTemporaryFile() as log, model_directory(*ECHO, name="echo") as model:
                arguments = ("--serve", str(model), "--port", "{port}", "--endpoint", collector.endpoint)
                command = (sys.executable, "-m", "benchmarks.observability", *arguments)
                with started(*command, log=Path(log.name)) as server:
                    server.wait_until_ready()
                    scraper = Scraper(server)
                    measured.append(await alternate(server, scraper, pairs))
                lines += log.read().count(b'"log":"access"')
                scrapes += scraper.scrapes
    report(measured, f"{scrapes} scrapes, {lines:,} lines, {collector.received:,} bytes of traces")


def report(measured: list[list[Pair]], what: str) -> None:
    rows = []
    for number, pairs in enumerate(measured, 1):
        plain, observed = (median([rates.requests for rates in turns]) for turns in zip(*pairs, strict=True))
        ratios = median([pair.ratio for pair in pairs]), median([pair.cost for pair in pairs])
        rows.append((str(number), f"{plain:,.0f}", f"{observed:,.0f}", *(f"{ratio:.3f}" for ratio in ratios)))
    show(("round", "plain, requests/s", "observed, requests/s", "ratio", "CPU per request, ratio"), rows, what)
    everything = [pair for pairs in measured for pair in pairs]
    for name, values in (
        ("requests/s", [pair.ratio for pair in everything]),
        ("CPU per request", [pair.cost for pair in everything]),
    ):
        low, high = interval(values)
        print(f"{name}, ratio: median {median(values):.4f}, 95 % interval {low:.4f} to {high:.4f}")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median: the values so far from the middle that chance does not reach them."""
    ordered = sorted(values)
    reach = 0.98 * math.sqrt(len(values))  # half of 1.96 standard deviations of a fair coin's heads
    middle = (len(values) - 1) / 2
    return ordered[max(0, math.floor(middle - reach))], ordered[min(len(values) - 1, math.ceil(middle + reach))]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="how often the server is started")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of turns in a round")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve, arguments.port, arguments.endpoint)
    uvloop.run(compare(arguments.rounds, arguments.pairs))


if __name__ == "__main__":
    main()
