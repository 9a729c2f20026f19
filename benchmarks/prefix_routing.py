"""Measures how several workers of one model get requests that share prefixes, with the demo model, over HTTP.

    python -m benchmarks.prefix_routing [--requests 64]

64 requests begin with one of four prefixes of 512 tokens, in random order, two at a time. They go

- to one worker whose KV cache has room for all four prefixes,
- to two workers of one server, each with room for two: the router chooses by the prefix,
- to two servers with one such worker each, in turns: what a balancer does that sees no prefixes.

Each prefix has come once before. The hit rate is the share of prompt tokens that were not computed again. Two workers
share the cores of one machine, so beside requests per second the table has the prompt tokens that were computed.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import httpx

from benchmarks.figures import parser_of, show
from benchmarks.load import run_load
from benchmarks.scheduling import BYTES_PER_TOKEN, Load, words
from benchmarks.servers import MODEL, serving

PREFIX, PREFIXES = 512, 4
QUESTION, ANSWER = 16, 4
AT_A_TIME = 2
LONGEST = PREFIX + QUESTION + ANSWER + 16
_COUNTERS = re.compile(r"^lmi_(cached_)?prompt_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)


class Outcome(NamedTuple):
    """What a load took: seconds, and tokens of all its prompts."""

    seconds: float
    cached: float
    prompt: float

    @property
    def hit_rate(self) -> float:
        return self.cached / self.prompt

    @property
    def computed(self) -> float:
        return self.prompt - self.cached


def loads(count: int) -> list[Load]:
    chance = random.Random(7)
    prefixes = [words(PREFIX, chance) for _ in range(PREFIXES)]
    return [Load(chance.choice(prefixes) + words(QUESTION, chance), ANSWER) for _ in range(count)]


def counted(ports: Sequence[int]) -> tuple[float, float]:
    """Return the cached tokens and all tokens of the prompts so far."""
    cached = prompt = 0.0
    for port in ports:
        for is_cached, value in _COUNTERS.findall(metrics_of(port)):
            cached += float(value) if is_cached else 0.0
            prompt += 0.0 if is_cached else float(value)
    return cached, prompt


def until_ready(port: int, workers: int) -> None:
    """Wait until all workers are there: a server is ready with its first one."""
    while not re.search(rf"^lmi_workers_ready{{[^}}]*}} {workers}\.0$", metrics_of(port), re.MULTILINE):
        time.sleep(0.2)


def metrics_of(port: int) -> str:
    return httpx.get(f"http://127.0.0.1:{port}/metrics").text


async def send_all(ports: Sequence[int], requests: Sequence[Load]) -> None:
    """Send the requests to the ports in turns, `AT_A_TIME` at a time."""
    room = asyncio.Semaphore(AT_A_TIME)

    async def send(number: int, load: Load) -> None:
        async with room:
            await run_load(ports[number % len(ports)], [load.body], 1, load.new_tokens)

    await asyncio.gather(*(send(number, load) for number, load in enumerate(requests)))


def measure(servers: int, workers: int, prefixes: int, requests: Sequence[Load]) -> Outcome:
    """Serve with `workers` on each of `servers`; the KV cache of each worker has room for `prefixes` and what runs.

    On the CPU a request that runs has a copy of its prefix.
    """
    variables = {
        "OPTION_KV_CACHE_MEMORY_GB": str((prefixes + AT_A_TIME) * LONGEST * BYTES_PER_TOKEN / 2**30),
        **dict.fromkeys(("SERVING_MIN_WORKERS", "SERVING_MAX_WORKERS"), str(workers)),
        "OMP_NUM_THREADS": "1",
    }
    first = list({tuple(load.prompt[:PREFIX]): load for load in requests}.values())
    with ExitStack() as stack:
        ports = [stack.enter_context(serving(MODEL, AT_A_TIME, **variables)).port for _ in range(servers)]
        for port in ports:
            until_ready(port, workers)
            for load in first:
                asyncio.run(send_all([port], [load]))
        before = counted(ports)
        began = time.perf_counter()
        asyncio.run(send_all(ports, requests))
        seconds = time.perf_counter() - began
        after = counted(ports)
    return Outcome(seconds, after[0] - before[0], after[1] - before[1])


PARTS = {
    "one worker": (1, 1, PREFIXES),
    "two, by prefix": (1, 2, PREFIXES // 2),
    "two, in turns": (2, 1, PREFIXES // 2),
}
"""Servers, workers of each, and the prefixes that a worker has room for."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--part", choices=PARTS, help="measure only this one")
    arguments = parser.parse_args()
    requests = loads(arguments.requests)
    rows, measured = [], {}
    for name in [arguments.part] if arguments.part else PARTS:
        measured[name] = found = measure(*PARTS[name], requests)
        rate = f"{len(requests) / found.seconds:.1f}"
        rows.append((name, f"{found.hit_rate:.1%}", f"{found.computed:,.0f}", rate))
    title = f"{len(requests)} requests with one of {PREFIXES} prefixes of {PREFIX} tokens"
    show(("", "hit rate", "prompt tokens computed", "requests/s"), rows, title)
    if len(measured) == len(PARTS):
        report(*measured.values())


def report(one: Outcome, routed: Outcome, turns: Outcome) -> None:
    """Print the figures beside each other."""
    print(f"hit rate, by prefix - one worker: {100 * (routed.hit_rate - one.hit_rate):+.1f} points (aim: > -5)")
    print(f"requests/s, by prefix / in turns: {turns.seconds / routed.seconds:.2f} (aim: >= 1.5)")
    print(f"prompt tokens computed, in turns / by prefix: {turns.computed / routed.computed:.2f}")


if __name__ == "__main__":
    main()
