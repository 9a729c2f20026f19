"""Measures the server under ten times the requests that it can serve.

    python -m benchmarks.overload

The model echoes with a delay before each token, so that its places limit the server and not the processor, which the
load generator shares. First all places are in use and nothing waits. Then requests come at a fixed rate, whatever is
answered. In the end requests are sent one by one until one is answered as fast as alone. Prints a table, and exits
with 1 if an aim is missed.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
from collections import Counter
from dataclasses import dataclass

import uvloop

from benchmarks.figures import parser_of, show
from benchmarks.load import LMI, send, tokens_within
from benchmarks.servers import echo_server
from lmi_server.bench.arrivals import Arrivals, ClosedLoop, OpenLoop
from lmi_server.bench.records import Record, quantile

PLACES = 32
TOKENS = 25
TOKEN_MS = 20
MAX_DELAY_MS = 1000
OVERLOAD = 10
MIN_THROUGHPUT, MAX_REFUSAL_MS, MAX_RECOVERY_S = 0.95, 50.0, 2.0  # the aims

_WARM_UP_S = 3.0  # until the queue is full, and its estimates are those of the overload
_PROBES, _PROBE_EVERY_S = 40, 0.1
_NEARLY_ALONE = 1.2  # times as long as alone, at most, is as fast as alone
_BODY = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": TOKENS}, "stream": True}


@dataclass(frozen=True)
class Result:
    """`alone` and `kept` are tokens per second, without and with the overload; times are in seconds.

    `late` is the longest time by which the load generator sent a request too late.
    """

    alone: float
    kept: float
    counts: Counter[int]
    refusals: list[float]
    accepted: list[float]
    recovery: float
    late: float

    @property
    def is_good(self) -> bool:
        return (
            self.kept >= MIN_THROUGHPUT * self.alone
            and statistics.median(self.refusals) * 1000 <= MAX_REFUSAL_MS
            and self.recovery <= MAX_RECOVERY_S
            and self.counts.keys() <= {200, 503}
        )


def recovery_s(probes: list[Record], alone_s: float) -> float:
    """Return the seconds until a request was sent that was answered nearly as fast as alone."""
    limit = _NEARLY_ALONE * alone_s
    good = (probe.due - probes[0].due for probe in probes if probe.is_good and took(probe) <= limit)
    return next(good, float("inf"))


def took(record: Record) -> float:
    return record.end - record.sent


async def run(seconds: float) -> Result:
    options = {"max_rolling_batch_size": PLACES, "echo_delay_ms": TOKEN_MS, "max_queue_delay_ms": MAX_DELAY_MS}
    with echo_server(**options) as server:

        async def ask(count: float, arrivals: Arrivals, limit_s: float | None = None) -> list[Record]:
            return await send(server.port, itertools.repeat(_BODY, round(count)), arrivals, limit_s, LMI)

        alone_s = statistics.median(map(took, await ask(5, ClosedLoop(1))))
        full_s = max(seconds / 4, 2.0)
        full = await ask(2 * full_s * PLACES / alone_s, ClosedLoop(PLACES), full_s + 1.0)
        alone = tokens_within(full, 0.5, 0.5 + full_s) / full_s
        rate, whole_s = OVERLOAD * alone / TOKENS, _WARM_UP_S + seconds
        flood = asyncio.create_task(ask(rate * whole_s, OpenLoop(rate, burstiness=float("inf"))))
        await asyncio.sleep(whole_s)
        probes = await ask(_PROBES, OpenLoop(1 / _PROBE_EVERY_S, burstiness=float("inf")))
        records = await flood
    kept = tokens_within(records, _WARM_UP_S, whole_s) / seconds
    late = [record for record in records if record.due - records[0].due >= _WARM_UP_S]
    accepted, refused = ([took(record) for record in late if record.status == code] for code in (200, 503))
    pause = max(record.sent - record.due for record in late)
    counts = Counter(record.status for record in late)
    return Result(alone, kept, counts, refused, accepted, recovery_s(probes, alone_s), pause)


def report(result: Result, seconds: float) -> None:
    """Print the figures beside their aims."""

    def ms(values: list[float]) -> str:
        ordered = sorted(values)
        return " / ".join(f"{1000 * quantile(ordered, share):,.1f}" for share in (0.5, 0.99, 1) if ordered) or "-"

    ratio = result.kept / result.alone
    rows = (
        ("tokens/s, all places in use, none waiting", f"{result.alone:,.0f}"),
        ("tokens/s under overload", f"{result.kept:,.0f} ({ratio:.3f})", f">= {MIN_THROUGHPUT}"),
        ("answers by status", ", ".join(f"{code}: {n:,}" for code, n in sorted(result.counts.items()))),
        ("ms to a 503: median / 99 % / longest", ms(result.refusals), f"median <= {MAX_REFUSAL_MS:g}"),
        ("ms to the end of an answer: the same", ms(result.accepted)),
        ("s to recovery", f"{result.recovery:.2f}", f"<= {MAX_RECOVERY_S:g}"),
        ("ms, longest delay of the load generator", f"{1000 * result.late:,.0f}"),
    )
    show(("measured", "", "aim"), rows, f"{OVERLOAD} times the capacity for {seconds:g} s")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the overload lasts")
    arguments = parser.parse_args()
    result = uvloop.run(run(arguments.seconds))
    report(result, arguments.seconds)
    sys.exit(0 if result.is_good else 1)


if __name__ == "__main__":
    main()
