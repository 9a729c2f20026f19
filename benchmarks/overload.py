"""Measures the server under ten times the requests that it can serve.

    python -m benchmarks.overload

The model echoes with a delay before each token, so that its places limit the server and not the processor, which the
load generator shares. First all places are in use and nothing waits. Then requests come at a fixed rate, whatever is
answered. In the end requests are sent one by one until one is answered as fast as alone. Prints a table, and exits
with 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import cast

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.relay import Load, Server, echo_server, measure, request_bytes

PLACES = 32
TOKENS = 25
TOKEN_MS = 20
MAX_DELAY_MS = 1000
OVERLOAD = 10
MIN_THROUGHPUT, MAX_REFUSAL_MS, MAX_RECOVERY_S = 0.95, 50.0, 2.0  # the aims

_TICK_S = 0.005
_WARM_UP_S = 3.0  # until the end of the first load, which breaks off its requests, has no influence on the rate
_PROBE_EVERY_S = 0.1
_NEARLY_ALONE = 1.2  # times as long as alone, at most, is as fast as alone
_MAX_PROBES = 100
_REQUEST = request_bytes(TOKENS, stream=True)


class Connection(asyncio.Protocol):
    """Sends one request at a time and reads the answer."""

    def __init__(self, overload: Overload) -> None:
        self._overload = overload
        self._transport: asyncio.WriteTransport | None = None
        self._began = 0.0
        self._status = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def send(self) -> None:
        assert self._transport is not None
        self._status = 0
        self._began = time.perf_counter()
        self._transport.write(_REQUEST)

    def data_received(self, data: bytes) -> None:
        self._status = self._status or int(data[9:12])
        if self._status == 200:
            self._overload.tokens += data.count(b'"token"')
            ends = data.endswith(b"0\r\n\r\n")
        else:
            ends = data.endswith(b"}")
        if ends:
            self._overload.ended(self, self._status, time.perf_counter() - self._began)

    def connection_lost(self, error: Exception | None) -> None:
        self._overload.lost(self)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


@dataclass
class Overload:
    """Requests that come at a fixed rate, each on a connection that is free then, and what became of them.

    `pause` is the longest time for which this process sent and read nothing.

    `seconds` has the times to the end of the answers by status, 0 standing for connections that were closed. `idle` is
    set while no answer is missing.
    """

    server: Server
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: int = 0
    pause: float = 0.0
    seconds: dict[int, list[float]] = field(default_factory=dict)
    _free: list[Connection] = field(default_factory=list)
    _busy: set[Connection] = field(default_factory=set)

    async def run(self, per_second: float, seconds: float) -> None:
        """Send requests for so long."""
        began, sent, before = time.perf_counter(), 0, 0.0
        while (passed := time.perf_counter() - began) < seconds:
            self.pause, before = max(self.pause, passed - before), passed
            while sent < passed * per_second:
                await self.send()
                sent += 1
            await asyncio.sleep(_TICK_S)

    async def send(self) -> None:
        if not self._free:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(lambda: Connection(self), "127.0.0.1", self.server.port)
            self._free.append(connection)
        connection = self._free.pop()
        self._busy.add(connection)
        self.idle.clear()
        connection.send()

    def ended(self, connection: Connection, status: int, seconds: float) -> None:
        self._free.append(connection)
        self._answered(connection, status, seconds)

    def lost(self, connection: Connection) -> None:
        if connection in self._busy:
            self._answered(connection, 0, 0.0)

    def _answered(self, connection: Connection, status: int, seconds: float) -> None:
        self.seconds.setdefault(status, []).append(seconds)
        self._busy.discard(connection)
        if not self._busy:
            self.idle.set()

    @property
    def counts(self) -> Counter[int]:
        return Counter({status: len(seconds) for status, seconds in self.seconds.items()})

    def close(self) -> None:
        for connection in (*self._free, *self._busy):
            connection.close()


@dataclass(frozen=True)
class Result:
    """`alone` and `kept` are tokens per second, without and with the overload; times are in seconds.

    `pause` is the longest time for which the load generator did nothing.
    """

    alone: float
    kept: float
    counts: Counter[int]
    refusals: list[float]
    accepted: list[float]
    recovery: float
    pause: float

    @property
    def is_good(self) -> bool:
        return (
            self.kept >= MIN_THROUGHPUT * self.alone
            and statistics.median(self.refusals) * 1000 <= MAX_REFUSAL_MS
            and self.recovery <= MAX_RECOVERY_S
            and self.counts.keys() <= {200, 503}
        )


async def recovery_s(server: Server, alone_s: float) -> float:
    """Return the seconds until a request is sent that is answered nearly as fast as alone."""
    began = time.perf_counter()
    probes: list[tuple[float, Overload]] = []
    for _ in range(_MAX_PROBES):
        probes.append((time.perf_counter() - began, probe := Overload(server)))
        await probe.send()
        await asyncio.sleep(_PROBE_EVERY_S)
        for sent, ended in probes:
            if any(seconds <= _NEARLY_ALONE * alone_s for seconds in ended.seconds.get(200, ())):
                return sent
    return float("inf")


async def one_request_s(server: Server) -> float:
    """Return the median time of a request on an idle server."""
    alone = Overload(server)
    for _ in range(5):
        await alone.send()
        await alone.idle.wait()
    alone.close()
    return statistics.median(alone.seconds[200])


async def run(seconds: float) -> Result:
    options = {"max_rolling_batch_size": PLACES, "echo_delay_ms": TOKEN_MS, "max_queue_delay_ms": MAX_DELAY_MS}
    with echo_server(**options) as server:
        await server.ready()
        alone_s = await one_request_s(server)
        load = await Load.open(server, PLACES, TOKENS, stream=True)
        alone = await measure(server, load, max(seconds / 4, 2.0))
        await load.close()
        overload = Overload(server)
        await overload.run(OVERLOAD * alone.requests, _WARM_UP_S)
        overload.tokens, overload.seconds, overload.pause = 0, {}, 0.0
        began = time.perf_counter()
        await overload.run(OVERLOAD * alone.requests, seconds)
        kept = overload.tokens / (time.perf_counter() - began)
        recovery = await recovery_s(server, alone_s)
        overload.close()
    answers = overload.seconds
    accepted, refused = answers.get(200, []), answers.get(503, [])
    return Result(alone.tokens, kept, overload.counts, refused, accepted, recovery, overload.pause)


def table(result: Result, seconds: float) -> Table:
    def ms(values: list[float], share: float) -> str:
        return f"{1000 * sorted(values)[int(share * (len(values) - 1))]:,.1f}" if values else "-"

    report = Table("measured", "", "aim", title=f"{OVERLOAD} times the capacity for {seconds:g} s")
    report.add_row("tokens/s, all places in use, none waiting", f"{result.alone:,.0f}")
    ratio = result.kept / result.alone
    report.add_row("tokens/s under overload", f"{result.kept:,.0f} ({ratio:.3f})", f">= {MIN_THROUGHPUT}")
    report.add_row("answers by status", ", ".join(f"{code}: {n:,}" for code, n in sorted(result.counts.items())))
    refusals = " / ".join(ms(result.refusals, share) for share in (0.5, 0.99, 1))
    report.add_row("ms to a 503: median / 99 % / longest", refusals, f"median <= {MAX_REFUSAL_MS:g}")
    accepted = " / ".join(ms(result.accepted, share) for share in (0.5, 0.99, 1))
    report.add_row("ms to the end of an answer: the same", accepted)
    report.add_row("s to recovery", f"{result.recovery:.2f}", f"<= {MAX_RECOVERY_S:g}")
    report.add_row("ms, longest pause of the load generator", f"{1000 * result.pause:,.0f}")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the overload lasts")
    arguments = parser.parse_args()
    result = uvloop.run(run(arguments.seconds))
    Console(width=120).print(table(result, arguments.seconds))
    sys.exit(0 if result.is_good else 1)


if __name__ == "__main__":
    main()
