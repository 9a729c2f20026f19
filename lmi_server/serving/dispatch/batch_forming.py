"""When waiting jobs go to a worker as one batch, and when a worker gives back jobs that it got ahead.

Batches are formed in the front end's process and not in the worker, because a job that waits here can go to whichever
worker is free first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmi_server.serving.dispatch.job_queue import JobQueue
from lmi_server.supervisor.job import Job

if TYPE_CHECKING:
    from lmi_server.supervisor.worker_process import WorkerProcess

_RECALL_PAUSE_S = 0.02


class BatchForming:
    """Forms the batches of one queue. `dispatch` is called when an incomplete batch has waited for long enough.

    `max_jobs` waiting jobs go at once whatever the batch size, because the queue is full then. `workers` returns the
    workers that serve.
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
        self._delay_timer: asyncio.TimerHandle | None = None
        self._recall_timer: asyncio.TimerHandle | None = None

    def is_due(self, size: int) -> bool:
        """Return whether the waiting jobs should go now, as a batch of `size`; otherwise start the delay timer."""
        if len(self._queue) >= min(size, self._max_jobs):
            return True
        left_s = self._queue.peek().queued_at + self._max_delay_s - time.monotonic()
        if left_s <= 0:
            return True
        if self._delay_timer is None:
            self._delay_timer = asyncio.get_running_loop().call_later(left_s, self._end_delay)
        return False

    def _end_delay(self) -> None:
        self._delay_timer = None
        self._dispatch()

    def watch_delayed(self) -> None:
        """Recall what a worker got ahead if the batch before it takes long.

        A handler that was fast until now may meet a slow batch. The jobs behind it would wait although another worker
        may be idle.
        """
        if self._recall_timer is None:
            self._recall_timer = asyncio.get_running_loop().call_later(_RECALL_PAUSE_S, self._recall_delayed)

    def _recall_delayed(self) -> None:
        self._recall_timer = None
        now = time.monotonic()
        ahead = [worker for worker in self._workers() if worker.requests.recall_delayed(now)]
        if ahead:
            self.watch_delayed()

    def stop(self) -> None:
        for timer in (self._delay_timer, self._recall_timer):
            if timer is not None:
                timer.cancel()
