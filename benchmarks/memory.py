"""Measures the worker's memory over 2,000 requests to the demo model.

    python -m benchmarks.memory

32 requests run at once, with prompts of 1 to 60 tokens and answers of 1 to 16. The first 400 requests touch every slot
of the KV cache, so that memory should not grow after them. Prints the resident memory of the worker every 400 requests.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.generation import serving
from benchmarks.load import LMI, run_load

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


def resident_mib(process: psutil.Process) -> float:
    return process.memory_info().rss / 2**20


def main() -> None:
    table = Table(title=f"Memory of the worker over {REQUESTS:,} requests, {CONCURRENCY} at once")
    table.add_column("after")
    table.add_column("worker, MiB", justify="right")
    table.add_column("front end, MiB", justify="right")
    with serving(Path("models/smollm2-135m-instruct"), 32) as (server, port):
        front_end = psutil.Process(server.pid)
        worker = front_end.children()[0]
        table.add_row("loading", f"{resident_mib(worker):.0f}", f"{resident_mib(front_end):.0f}")
        for done in range(BLOCK, REQUESTS + 1, BLOCK):
            asyncio.run(run_load(port, bodies(done), CONCURRENCY, api=LMI))
            table.add_row(f"{done:,} requests", f"{resident_mib(worker):.0f}", f"{resident_mib(front_end):.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
