"""Measures what scrapes, the access log and traces cost a server of the echo handler.

    python -m benchmarks.observability

Two servers run side by side, and one at a time has work: a plain one, and one that is scraped every second, writes a
line in JSON for each request and traces 1 % of them. Turns alternate in pairs (plain, observed; observed, plain), so
that whatever else the machine does meets both. Each round starts both servers anew: where a process has its code and
data makes two plain servers differ by up to 3 %. Prints the ratio of the medians of each round, the median of these
ratios and their quartiles.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.relay import Load, Rates, Server, measure

CONNECTIONS, TOKENS = 64, 4
SCRAPE = b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: application/openmetrics-text;version=1.0.0\r\n\r\n"
OBSERVED = {"SERVING_ACCESS_LOG": "json", "SERVING_LOG_FORMAT": "json", "SERVING_TRACE_SAMPLE": "0.01"}
ENDPOINT = "SERVING_OTLP_TRACES_ENDPOINT"


def serve(directory: Path, port: int, endpoint: str | None) -> None:
    from frontend.server import run
    from lmi_server.configuration.server_settings import resolve_server
    from lmi_server.serving.model_store import ModelSource

    variables = {} if endpoint is None else {**OBSERVED, ENDPOINT: endpoint}
    settings, _ = resolve_server(variables, {"port": port, "log_level": "warning"})
    sys.exit(run([ModelSource(str(directory), "echo")], settings, {}))


@contextlib.contextmanager
def running(parent: Path, name: str, *arguments: str) -> Iterator[Server]:
    directory = parent / name
    directory.mkdir()
    (directory / "serving.properties").write_text(
        "option.entryPoint=djl_python.echo\noption.max_rolling_batch_size=256\n"
    )
    command = (sys.executable, "-m", "benchmarks.observability", "--serve", str(directory), "--port", "{port}")
    server = Server(*command, *arguments, log=parent / f"{name}.log")
    try:
        yield server
    finally:
        server.stop()


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
    """Reads the metrics of a server every second, as Prometheus does."""

    def __init__(self, server: Server) -> None:
        self.scrapes = 0
        self._server = server

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            while True:
                writer.write(SCRAPE)
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                assert (await reader.readexactly(length)).endswith(b"# EOF\n"), "it is not OpenMetrics"
                self.scrapes += 1
                await asyncio.sleep(1)
        finally:
            writer.close()


async def turn(server: Server, seconds: float) -> Rates:
    load = await Load.open(server, CONNECTIONS, TOKENS, stream=False)
    try:
        return await measure(server, load, seconds)
    finally:
        await load.close()


async def observed_turn(server: Server, scraper: Scraper, seconds: float) -> Rates:
    scraping = asyncio.create_task(scraper.run())
    try:
        return await turn(server, seconds)
    finally:
        scraping.cancel()


async def compare(rounds: int, pairs: int, seconds: float) -> None:
    collector = Collector()
    measured: list[tuple[Rates, Rates]] = []
    scrapes = lines = 0
    async with collector.listening():
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as parent:
                with (
                    running(Path(parent), "plain") as plain,
                    running(Path(parent), "observed", "--endpoint", collector.endpoint) as observed,
                ):
                    scraper = Scraper(observed)
                    turns = await alternate(plain, observed, scraper, pairs, seconds)
                first, last = zip(*turns, strict=True)
                measured.append((median_rates(first), median_rates(last)))
                lines += (Path(parent) / "observed.log").read_bytes().count(b'"log":"access"')
                scrapes += scraper.scrapes
    report(measured, f"{scrapes} scrapes, {lines:,} lines, {collector.received:,} bytes of traces")


async def alternate(
    plain: Server, observed: Server, scraper: Scraper, pairs: int, seconds: float
) -> list[tuple[Rates, Rates]]:
    await plain.ready()
    await observed.ready()
    turns = []
    for number in range(pairs):
        if number % 2:
            last = await observed_turn(observed, scraper, seconds)
            turns.append((await turn(plain, seconds), last))
        else:
            first = await turn(plain, seconds)
            turns.append((first, await observed_turn(observed, scraper, seconds)))
    return turns


def median_rates(turns: Sequence[Rates]) -> Rates:
    names = ("requests", "tokens", "chunks", "cpu_s")
    return Rates(*(statistics.median([getattr(rates, name) for rates in turns]) for name in names))


def report(measured: list[tuple[Rates, Rates]], what: str) -> None:
    table = Table("round", "plain, requests/s", "observed, requests/s", "ratio", "CPU per request, ratio", title=what)
    ratios = [observed.requests / plain.requests for plain, observed in measured]
    costs = [cpu_per_request(observed) / cpu_per_request(plain) for plain, observed in measured]
    for number, ((plain, observed), ratio, cost) in enumerate(zip(measured, ratios, costs, strict=True), 1):
        table.add_row(str(number), f"{plain.requests:,.0f}", f"{observed.requests:,.0f}", f"{ratio:.3f}", f"{cost:.3f}")
    console = Console(width=120)
    console.print(table)
    for name, values, aim in (("requests/s", ratios, "at least 0.980"), ("CPU per request", costs, "")):
        low, median, high = statistics.quantiles(values, n=4)
        console.print(f"{name}, ratio: median {median:.3f}, quartiles {low:.3f} to {high:.3f}  {aim}")


def cpu_per_request(rates: Rates) -> float:
    return rates.cpu_s / rates.requests


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observability", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="how often both servers are started, at least 2")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of turns in a round")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each turn is measured")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve, arguments.port, arguments.endpoint)
    uvloop.run(compare(arguments.rounds, arguments.pairs, arguments.seconds))


if __name__ == "__main__":
    main()
