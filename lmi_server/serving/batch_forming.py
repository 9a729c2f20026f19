"""When jobs that wait go to a worker as one batch, and when a worker gives back what it got ahead.

Batches are formed in the pool and not in the worker, because a job that waits there can go to whichever worker is free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmi_server.serving.job_queue import JobQueue
from lmi_server.supervisor.job import Job

if TYPE_CHECKING:
    from lmi_server.supervisor.worker_process import WorkerProcess

_RECALL_PAUSE_S = 0.02


class BatchForming:
    """Looks after the batches of one queue. `dispatch` is called when a batch that waits for more has waited enough.

    `max_jobs` waiting jobs go at once whatever the batch size: the queue is full. `workers` returns those that serve.
    """

    def __init__(
        self,
        queue: JobQueue[Job],
        max_jobs: int,
        max_delay_s: float,
        dispatch: Callable[[], None],
        workers: Callable[[], Sequence[WorkerProcess]],
    ) -> None:
        self._queue = queue
        self._max_jobs = max_jobs
        self._max_delay_s = max_delay_s
        self._dispatch = dispatch
        self._workers = workers
        self._due: asyncio.TimerHandle | None = None
        self._recalling: asyncio.TimerHandle | None = None

    def is_due(self, size: int) -> bool:
        """Tell whether what waits is to go as a batch of `size`; where it is too few yet, see that it will in time."""
        if len(self._queue) >= min(size, self._max_jobs):
            return True
        left_s = self._queue.peek().queued_at + self._max_delay_s - time.monotonic()
        if left_s <= 0:
            return True
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(left_s, self._end_delay)
        return False

    def _end_delay(self) -> None:
        self._due = None
        self._dispatch()

    def watch_delayed(self) -> None:
        """Have what a worker got ahead go back to the queue where the batch before it takes long."""
        if self._recalling is None:
            self._recalling = asyncio.get_running_loop().call_later(_RECALL_PAUSE_S, self._recall_delayed)

    def _recall_delayed(self) -> None:
        self._recalling = None
        now = time.monotonic()
        ahead = [worker for worker in self._workers() if worker.recall_delayed(now)]
        if ahead:
            self.watch_delayed()

    def stop(self) -> None:
        for timer in (self._due, self._recalling):
            if timer is not None:
                timer.cancel()
