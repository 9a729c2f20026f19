"""Measures the relay (front end, link, and a worker with the echo handler) beside a bare uvicorn app that echoes.

    python -m benchmarks.relay

Servers and load generator run on the same machine, one comparison after the other. Prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import uvicorn
import uvloop
from rich.console import Console
from rich.table import Table

PROMPT = "The capital of France is"
EVENT = b'{"token":{"id":0,"text":" capital","log_prob":0.0}}\n'
CLOCK_TICK = os.sysconf("SC_CLK_TCK")


def request_bytes(max_new_tokens: int, stream: bool) -> bytes:
    body = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": max_new_tokens}, "stream": stream}).encode()
    headers = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return f"POST /invocations HTTP/1.1\r\n{headers}".encode() + body


# --- the servers ---


async def bare_app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
    """Echo the body, or stream events, in the server's own process: what uvicorn alone can do."""
    body = (await receive())["body"]
    request = json.loads(body)
    if not request["stream"]:
        length = b"%d" % len(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/jsonlines")]})
    for _ in range(request["parameters"]["max_new_tokens"]):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


def serve_bare(port: int) -> None:
    uvicorn.run(
        "benchmarks.relay:bare_app",
        port=port, loop="uvloop", http="httptools", lifespan="off", access_log=False, log_level="warning",
    )  # fmt: skip


def serve_relay(directory: Path, port: int) -> None:
    from frontend.server import run
    from lmi_server.configuration.server_settings import resolve_server
    from lmi_server.serving.models.model_store import ModelSource

    settings, _ = resolve_server({}, {"port": port, "log_level": "warning"})
    sys.exit(run([ModelSource(str(directory), "echo")], settings, {}))


class UnavailableError(Exception):
    """A server cannot be installed or started, or does not answer."""


class Server:
    """A server in its own process; "{port}" in its command stands for its port.

    Its output goes to `log`, if there is one.
    """

    def __init__(self, *command: str, log: Path | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = tuple(part.replace("{port}", str(self.port)) for part in command)
        with open(log, "wb") if log is not None else contextlib.nullcontext() as output:
            self._process = subprocess.Popen(command, start_new_session=True, stdout=output, stderr=output)

    async def ready(self, request: bytes = b"") -> None:
        """Wait until it answers `request`; the default is a request of this benchmark.

        Raises:
            UnavailableError: it has exited, or does not answer within a minute.
        """
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise UnavailableError(f"the server exited with {self._process.returncode}")
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(request or request_bytes(1, stream=False))
                status = await reader.readuntil(b"\r\n")
                writer.close()
                if b" 200 " in status:
                    return
            await asyncio.sleep(0.1)
        raise UnavailableError("the server did not answer within 60 s")

    def pids(self) -> list[int]:
        """Return the server's process and its children."""
        # A child belongs to the thread that started it.
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        return [self._process.pid, *(int(pid) for thread in threads for pid in thread.read_text().split())]

    def cpu_s(self) -> float:
        """Return the CPU time that the server and its workers have used."""
        total = 0
        for pid in self.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / CLOCK_TICK

    def frontend_mib(self) -> float:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self._process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) / 1024

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # whatever the server left behind


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[Server]:
    server = Server(sys.executable, "-m", "benchmarks.relay", "--port", "{port}", *arguments)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def echo_server(**options: object) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent) / "echo"
        directory.mkdir()
        lines = ["option.entryPoint=djl_python.echo", "job_queue_size=20000"]
        lines += [f"option.{name}={value}" for name, value in options.items()]
        (directory / "serving.properties").write_text("\n".join(lines) + "\n")
        with running("--serve", str(directory)) as server:
            yield server


# --- the clients ---


class Client(asyncio.Protocol):
    """Sends one request after the other over one connection and counts what comes back."""

    def __init__(self, request: bytes, stream: bool) -> None:
        self.responses = 0
        self.tokens = 0
        self.chunks = 0
        self.latencies: list[float] = []
        self._request = request
        self._chunked = stream
        self._transport: asyncio.WriteTransport | None = None
        self._has_begun = False  # the present answer
        self._answer = b""  # what has come of it, if it is not in chunks
        self._body_length = 0  # of every answer, 0 before the first
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._next()

    def _next(self) -> None:
        assert self._transport is not None
        self._has_begun, self._answer = False, b""
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._has_begun:
            self.latencies.append(time.perf_counter() - self._sent_at)
            self._has_begun = True
        if self._chunked:
            self.tokens += data.count(b'"token"')
            self.chunks += data.count(b"\r\n") // 2
            done = data.endswith(b"0\r\n\r\n")
        else:
            done = self._whole(data)
        if done:
            self.responses += 1
            self._next()

    def _whole(self, data: bytes) -> bool:
        """Return whether the answer is complete.

        All answers to one request have a body of the same length. Their heads differ: that of an answer that is traced
        has a line more.
        """
        self._answer += data
        head_end = self._answer.find(b"\r\n\r\n") + 4
        if head_end < 4:
            return False
        if not self._body_length:
            head = self._answer[:head_end]
            assert head.startswith(b"HTTP/1.1 200"), head
            if b"transfer-encoding: chunked" in head:
                self._chunked = True
                return data.endswith(b"0\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None, head
            self._body_length = int(length[1])
        return len(self._answer) >= head_end + self._body_length

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Load:
    """Connections that all send the same request again and again."""

    def __init__(self, clients: list[Client]) -> None:
        self.clients = clients

    @classmethod
    async def open(cls, server: Server, connections: int, max_new_tokens: int, stream: bool) -> Load:
        request = request_bytes(max_new_tokens, stream)
        loop = asyncio.get_running_loop()
        clients = []
        for _ in range(connections):
            client = Client(request, stream)
            await loop.create_connection(lambda client=client: client, "127.0.0.1", server.port)  # type: ignore[misc]
            clients.append(client)
        return cls(clients)

    def counts(self) -> tuple[int, int, int]:
        return (
            sum(client.responses for client in self.clients),
            sum(client.tokens for client in self.clients),
            sum(client.chunks for client in self.clients),
        )

    async def close(self) -> None:
        for client in self.clients:
            client.close()
        await asyncio.sleep(0.5)  # until both sides have noticed


class Rates:
    """The rates of a load while it was measured."""

    def __init__(self, requests: float, tokens: float, chunks: float, cpu_s: float) -> None:
        self.requests, self.tokens, self.chunks = requests, tokens, chunks
        self.cpu_s = cpu_s  # seconds of CPU per second


async def measure(server: Server, load: Load, seconds: float, warm_s: float = 0.5) -> Rates:
    await asyncio.sleep(warm_s)
    before, cpu, start = load.counts(), server.cpu_s(), time.perf_counter()
    await asyncio.sleep(seconds)
    after, cpu_after, end = load.counts(), server.cpu_s(), time.perf_counter()
    requests, tokens, chunks = ((new - old) / (end - start) for new, old in zip(after, before, strict=True))
    return Rates(requests, tokens, chunks, (cpu_after - cpu) / (end - start))


async def rates(server: Server, connections: int, max_new_tokens: int, stream: bool, seconds: float) -> Rates:
    await server.ready()
    load = await Load.open(server, connections, max_new_tokens, stream)
    try:
        return await measure(server, load, seconds)
    finally:
        await load.close()


async def median_latency_ms(server: Server, seconds: float) -> float:
    """Return the median time to the first byte of a streamed answer, one stream at a time."""
    await server.ready()
    load = await Load.open(server, 1, 1, stream=True)
    await asyncio.sleep(seconds)
    await load.close()
    return statistics.median(load.clients[0].latencies[20:]) * 1000


# --- the table ---


class Report:
    def __init__(self) -> None:
        self.table = Table("measured", "relay", "bare uvicorn", "ratio", "aim", title="The relay on this machine")

    def row(self, what: str, relay: str, bare: str = "", ratio: str = "", aim: str = "") -> None:
        self.table.add_row(what, relay, bare, ratio, aim)


async def throughput(report: Report, seconds: float) -> None:
    with running("--bare") as bare, echo_server(max_rolling_batch_size=256) as relay:
        theirs = await rates(bare, 64, 4, False, seconds)
        ours = await rates(relay, 64, 4, False, seconds)
        ratio = f"{ours.requests / theirs.requests:.2f}"
        report.row("requests/s, 64 connections", f"{ours.requests:,.0f}", f"{theirs.requests:,.0f}", ratio, ">= 8,000")
        relay_ms, bare_ms = await median_latency_ms(relay, 2), await median_latency_ms(bare, 2)
        report.row(
            "first byte, one stream, median ms", f"{relay_ms:.2f}", f"{bare_ms:.2f}",
            f"+{relay_ms - bare_ms:.2f} ms", "< 1 ms added",
        )  # fmt: skip
        for streams in (1, 8, 64, 256):
            await streaming(report, relay, bare, streams, "", seconds)
    with running("--bare") as bare, echo_server(max_rolling_batch_size=256, echo_step="true") as relay:
        for streams in (1, 8, 64, 256):
            await streaming(report, relay, bare, streams, ", one a step", seconds)


async def streaming(report: Report, relay: Server, bare: Server, streams: int, how: str, seconds: float) -> None:
    theirs = await rates(bare, streams, 2000, True, seconds)
    ours = await rates(relay, streams, 2000, True, seconds)
    report.row(
        f"streamed tokens/s, {streams} streams{how}",
        f"{ours.tokens:,.0f} ({ours.chunks:,.0f} HTTP chunks, {1e6 * ours.cpu_s / ours.tokens:.1f} us CPU per token)",
        f"{theirs.tokens:,.0f}",
        f"{ours.tokens / theirs.tokens:.2f}",
        ">= 60,000",
    )


async def memory(report: Report) -> None:
    with echo_server(max_rolling_batch_size=1000, echo_delay_ms=100) as relay:
        await relay.ready()
        before = relay.frontend_mib()
        load = await Load.open(relay, 1000, 100_000, stream=True)
        await asyncio.sleep(3)
        assert all(client.tokens for client in load.clients), "not every stream is open"
        report.row("front end MiB, 1,000 open streams", f"{relay.frontend_mib():.0f} (idle {before:.0f})", aim="< 120")
        await load.close()


async def waiting(report: Report, seconds: float) -> None:
    """Compare running streams with and without 10,000 waiting requests, in turns.

    The streams have the pace of an engine. At full speed every core would be busy, and the load generator's share of
    them would decide the figure. The CPU time per token shows what waiting requests cost.
    """
    with echo_server(max_rolling_batch_size=32, echo_delay_ms=2) as relay:
        await relay.ready()
        load = await Load.open(relay, 32, 100_000_000, stream=True)
        alone, crowded = [], []
        for _ in range(3):
            alone.append(await measure(relay, load, seconds))
            queued = await Load.open(relay, 10_000, 1, stream=False)
            await asyncio.sleep(1)
            crowded.append(await measure(relay, load, seconds))
            await queued.close()
            await asyncio.sleep(1)
        await load.close()
    (before, cpu_before), (after, cpu_after) = (_tokens_and_cpu(rounds) for rounds in (alone, crowded))
    report.row(
        "tokens/s, 32 streams, 10,000 waiting",
        f"{after:,.0f} (none waiting {before:,.0f})",
        ratio=f"{100 * (after / before - 1):+.1f} %",
        aim="> -2 %",
    )
    report.row(
        "CPU us per token, the same", f"{cpu_after:.1f} (none waiting {cpu_before:.1f})",
        ratio=f"{100 * (cpu_after / cpu_before - 1):+.1f} %",
    )  # fmt: skip


def _tokens_and_cpu(rounds: list[Rates]) -> tuple[float, float]:
    """Return the mean of tokens/s and of microseconds of CPU per token."""
    tokens = statistics.mean(measured.tokens for measured in rounds)
    return tokens, 1e6 * statistics.mean(measured.cpu_s for measured in rounds) / tokens


async def bench(seconds: float) -> None:
    report = Report()
    await throughput(report, seconds)
    await memory(report)
    await waiting(report, seconds)
    Console(width=150).print(report.table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each figure is measured")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        serve_bare(arguments.port)
    elif arguments.serve is not None:
        serve_relay(arguments.serve, arguments.port)
    else:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        uvloop.run(bench(arguments.seconds))


if __name__ == "__main__":
    main()
