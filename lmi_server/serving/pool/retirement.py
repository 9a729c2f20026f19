"""Pools that no model has any more: each lets its requests finish, then ends its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

from lmi_server.serving.pool.worker_pool import WorkerPool


class RetiringPools:
    """The pools that are ending. `stop` and `kill` of the registry must still reach their workers."""

    def __init__(self) -> None:
        self._pools: set[WorkerPool] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[WorkerPool]:
        return iter(tuple(self._pools))

    def begin(self, pool: WorkerPool, drain_timeout_s: float, reason: str) -> None:
        """End a pool as `end` does, in the background."""
        self._pools.add(pool)
        self.run(self.end(pool, drain_timeout_s, reason))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`, which ends pools, in the background."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self, pool: WorkerPool, drain_timeout_s: float, reason: str) -> None:
        """Let the requests of a pool finish within `drain_timeout_s` seconds, fail the rest, and end the workers."""
        self._pools.add(pool)
        await pool.drain(drain_timeout_s, reason)
        await pool.stop()
        self._pools.discard(pool)
