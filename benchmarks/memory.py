"""Measures the worker's memory over 2,000 requests to the demo model.

    python -m benchmarks.memory

32 requests run at once, with prompts of 1 to 60 tokens and answers of 1 to 16. The first 400 requests touch every slot
of the KV cache, so that memory should not grow after them. Prints the resident memory of the worker every 400 requests.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from benchmarks.figures import show
from benchmarks.load import LMI, run_load
from benchmarks.servers import MODEL, Server, serving

REQUESTS = 2000
BLOCK = 400
CONCURRENCY = 32


def bodies(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [
        {
            "inputs": "word " * chance.randint(1, 60),
            "parameters": {"max_new_tokens": chance.randint(1, 16), "ignore_eos": True},
        }
        for _ in range(BLOCK)
    ]


def row(after: str, server: Server) -> tuple[str, ...]:
    return after, f"{server.memory_mib(1):.0f}", f"{server.memory_mib():.0f}"


def main() -> None:
    with serving(MODEL, CONCURRENCY) as server:
        rows = [row("loading", server)]
        for done in range(BLOCK, REQUESTS + 1, BLOCK):
            asyncio.run(run_load(server.port, bodies(done), CONCURRENCY, api=LMI))
            rows.append(row(f"{done:,} requests", server))
    title = f"Memory of the worker over {REQUESTS:,} requests, {CONCURRENCY} at once"
    show(("after", "worker, MiB", "front end, MiB"), rows, title)


if __name__ == "__main__":
    main()
