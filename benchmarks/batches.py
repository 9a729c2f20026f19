"""Measures what live requests notice of a batch that runs beneath them, with the demo model.

    python -m benchmarks.batches [--beside N] [--pairs N] [--seconds S]

Live clients send one request after the other, in turns with and without a batch that has more lines than there is time
for. Then the batch has the server to itself. Prints the latencies of both, and the tokens per second of the batch.
Exits with 1 if the 99th percentile beside the batch is more than 1.1 times the one without.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.generation import MODEL, serving
from benchmarks.load import completion, run_load
from lmi_server.bench.records import quantile

CLIENTS = 2
LIVE_TOKENS, LINE_TOKENS = 8, 64
LINES = 5000
MAX_RATIO = 1.1
END_S = 60.0  # for a batch to end once it is cancelled
QUIET_S = 1.5  # until a batch takes the places that live requests have left


@dataclass
class Latencies:
    """Seconds of live requests."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)

    def ratio(self, share: float) -> float:
        return quantile(sorted(self.beside), share) / quantile(sorted(self.alone), share)


@dataclass
class Batch:
    """The batch of one server."""

    http: httpx.Client
    id: str = ""

    def begin(self) -> None:
        body = {"model": "lmi", "prompt": "The fox", "max_tokens": LINE_TOKENS, "ignore_eos": True}
        lines = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            for number in range(LINES)
        ]
        data = "".join(json.dumps(line) + "\n" for line in lines)
        file = self.http.post("/v1/files", files={"file": data.encode()}, data={"purpose": "batch"}).json()
        batch = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        self.id = self.http.post("/v1/batches", json=batch).json()["id"]

    def completed(self) -> int:
        return int(self.http.get(f"/v1/batches/{self.id}").json()["request_counts"]["completed"])

    def end(self) -> None:
        self.http.post(f"/v1/batches/{self.id}/cancel")
        ends = time.monotonic() + END_S
        while (found := self.http.get(f"/v1/batches/{self.id}").json()).get("status") not in ("cancelled", "completed"):
            if found.get("status") in ("failed", "expired", None) or time.monotonic() > ends:
                raise RuntimeError(f"the batch does not end as it should: {found}")
            time.sleep(0.05)


@contextlib.contextmanager
def batch_server(beside: int) -> Iterator[tuple[int, Batch]]:
    with tempfile.TemporaryDirectory() as store:
        os.environ |= {"SERVING_BATCHES_STORE": store, "SERVING_BATCHES_BESIDE_LIVE": str(beside)}
        with serving(MODEL, 64) as (_, port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            yield port, Batch(http)


def live(port: int, seconds: float) -> list[float]:
    """Return the latencies of live requests for about so many seconds."""
    bodies: list[dict[str, Any]] = [completion("lmi", "One two three four five six", LIVE_TOKENS, False)] * CLIENTS
    found: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        _, records = asyncio.run(run_load(port, bodies * 4, CLIENTS, LIVE_TOKENS))
        found += [record.end - record.sent for record in records]
    return found


def measure(port: int, batch: Batch, pairs: int, seconds: float) -> tuple[Latencies, float]:
    """Return the latencies of live requests, and the tokens per second of the batch alone."""
    latencies = Latencies()
    live(port, 1.0)
    for number in range(pairs):
        for with_batch in (False, True) if number % 2 else (True, False):
            if with_batch:
                batch.begin()
                latencies.beside += live(port, seconds)
                batch.end()
            else:
                latencies.alone += live(port, seconds)
    batch.begin()
    time.sleep(QUIET_S)
    before, began = batch.completed(), time.monotonic()
    time.sleep(seconds)
    rate = (batch.completed() - before) * LINE_TOKENS / (time.monotonic() - began)
    batch.end()
    return latencies, rate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=int, default=0, help="batches_beside_live")
    parser.add_argument("--pairs", type=int, default=2, help="turns with and without a batch")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each turn")
    asked = parser.parse_args()
    with batch_server(asked.beside) as (port, batch):
        latencies, rate = measure(port, batch, asked.pairs, asked.seconds)
    table = Table("live requests", "alone (ms)", "beside a batch (ms)", "ratio")
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        alone, beside = (quantile(sorted(values), share) * 1000 for values in (latencies.alone, latencies.beside))
        table.add_row(name, f"{alone:.1f}", f"{beside:.1f}", f"{latencies.ratio(share):.3f}")
    Console().print(table)
    counts = f"{len(latencies.alone)} and {len(latencies.beside)}"
    print(f"requests: {counts}; a batch alone: {rate:.1f} tokens per second")
    return 0 if latencies.ratio(0.99) <= MAX_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
