"""What workers measure of themselves and of their engines, for `/metrics` and the console."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.protocol import GetMetrics

if TYPE_CHECKING:
    from lmi_server.supervisor.worker_process import WorkerProcess

_TIMEOUT_S = 1.0


def summed_gauges(by_worker: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the gauges of a model's handlers, summed over its workers."""
    total: dict[str, float] = {}
    for gauges in by_worker.values():
        for name, value in gauges.items():
            total[name] = total.get(name, 0.0) + value
    return total


async def engine_metrics(workers: Sequence[WorkerProcess]) -> dict[str, bytes]:
    """Return the metrics of each worker's engine in Prometheus' text format, by the worker's name.

    Workers whose engine has no metrics, or that do not answer within a second, are left out: no scrape waits for them.
    """

    workers = list(workers)  # it may change meanwhile

    async def ask(worker: WorkerProcess) -> bytes:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await worker.controls.call(GetMetrics())
        except (LmiServerError, TimeoutError):
            return b""

    texts = await asyncio.gather(*map(ask, workers))
    return {worker.name: text for worker, text in zip(workers, texts, strict=True) if text}
