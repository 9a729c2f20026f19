"""Measures what live requests notice of a batch that runs beneath them, with the demo model.

    python -m benchmarks.batches [--beside N] [--pairs N] [--seconds S]

Live clients send one request after the other, in turns with and without a batch that has more lines than there is time
for. Then the batch has the server to itself. Prints the latencies of both, and the tokens per second of the batch.
Exits with 1 if the 99th percentile beside the batch is more than 1.1 times the one without.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from benchmarks.figures import in_turns, parser_of, show
from benchmarks.load import completion, run_load
from benchmarks.servers import MODEL, serving
from lmi_server.bench.records import quantile

CLIENTS = 2
LIVE_TOKENS, LINE_TOKENS = 8, 64
LINES = 5000
MAX_RATIO = 1.1
END_S = 60.0  # for a batch to end once it is cancelled
QUIET_S = 1.5  # until a batch takes the places that live requests have left


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
        variables = {"SERVING_BATCHES_STORE": store, "SERVING_BATCHES_BESIDE_LIVE": str(beside)}
        with serving(MODEL, 64, **variables) as server, httpx.Client(base_url=server.url, timeout=60) as http:
            yield server.port, Batch(http)


def live(port: int, seconds: float) -> list[float]:
    """Return the latencies of live requests for about so many seconds."""
    bodies: list[dict[str, Any]] = [completion("lmi", "One two three four five six", LIVE_TOKENS, False)] * CLIENTS
    found: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        _, records = asyncio.run(run_load(port, bodies * 4, CLIENTS, LIVE_TOKENS))
        found += [record.end - record.sent for record in records]
    return found


def live_beside(port: int, batch: Batch, seconds: float) -> list[float]:
    batch.begin()
    found = live(port, seconds)
    batch.end()
    return found


def rate_alone(batch: Batch, seconds: float) -> float:
    """Return the tokens per second of the batch alone."""
    batch.begin()
    time.sleep(QUIET_S)
    before, began = batch.completed(), time.monotonic()
    time.sleep(seconds)
    rate = (batch.completed() - before) * LINE_TOKENS / (time.monotonic() - began)
    batch.end()
    return rate


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--beside", type=int, default=0, help="batches_beside_live")
    parser.add_argument("--pairs", type=int, default=2, help="turns with and without a batch")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each turn")
    asked = parser.parse_args()
    with batch_server(asked.beside) as (port, batch):
        live(port, 1.0)
        runs = {"alone": partial(live, port, asked.seconds), "beside": partial(live_beside, port, batch, asked.seconds)}
        found = in_turns(asked.pairs, runs, warm=False)
        rate = rate_alone(batch, asked.seconds)
    alone, beside = (sorted(itertools.chain.from_iterable(turns)) for turns in found.values())
    rows, ratio = [], 0.0
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        one, other = quantile(alone, share), quantile(beside, share)
        ratio = other / one
        rows.append((name, f"{one * 1000:.1f}", f"{other * 1000:.1f}", f"{ratio:.3f}"))
    show(("live requests", "alone (ms)", "beside a batch (ms)", "ratio"), rows)
    print(f"requests: {len(alone)} and {len(beside)}; a batch alone: {rate:.1f} tokens per second")
    return 0 if ratio <= MAX_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
