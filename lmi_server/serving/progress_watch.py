"""Gives up requests that make no progress, and workers that hang."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmi_server.contract.errors import LmiServerError, PredictTimeoutError
from lmi_server.supervisor.job import Job

if TYPE_CHECKING:
    from lmi_server.supervisor.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

_WATCHES_PER_TIMEOUT = 4  # how finely the shortest timeout is watched
_LONGEST_WATCH_S = 1.0


class ProgressWatch:
    """Looks around several times within `shortest_s`, from `start` to `stop`.

    A request without progress for `predict_timeout_s` is ended with `end`. `workers` returns those that serve; `retire`
    is called with the time, for who may go because nothing is to do.
    """

    def __init__(
        self,
        predict_timeout_s: float,
        shortest_s: float,
        workers: Callable[[], Sequence[WorkerProcess]],
        end: Callable[[Job, LmiServerError], None],
        retire: Callable[[float], None],
    ) -> None:
        self._timeout_s = predict_timeout_s
        self._pause_s = min(_LONGEST_WATCH_S, shortest_s / _WATCHES_PER_TIMEOUT)
        self._workers = workers
        self._end = end
        self._retire = retire
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._look_around)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look_around(self) -> None:
        now = time.monotonic()
        for worker in self._workers():
            self._check(worker, now)
        self._retire(now)
        self.start()

    def _check(self, worker: WorkerProcess, now: float) -> None:
        if worker.used or worker.in_flight:
            worker.used = False
            worker.idle_since = now
        if worker.moved or not worker.in_flight:
            worker.moved = False
            worker.quiet_since = now
        overdue = [job for job in worker.in_flight.values() if self._is_overdue(job, now)]
        if overdue:
            self._give_up(worker, overdue, now)

    def _is_overdue(self, job: Job, now: float) -> bool:
        waits = job.worker is not None and not job.worker.has_begun(job)
        if job.reply.progressed or waits:
            job.reply.progressed = False
            job.quiet_since = now
        return now - job.quiet_since >= self._timeout_s

    def _give_up(self, worker: WorkerProcess, overdue: Sequence[Job], now: float) -> None:
        """Fail what is overdue. A worker that does nothing for the others either hangs, as one that keeps a place."""
        hangs = now - worker.quiet_since >= self._timeout_s or any(job.cancelled for job in overdue)
        error = PredictTimeoutError(f"The request made no progress within predict_timeout={self._timeout_s:g} seconds")
        for job in overdue:
            logger.error("request %s: no progress for %g seconds; it is given up", job.request_id, self._timeout_s)
            self._end(job, error)
            job.cancelled = True
            job.quiet_since = now
            if not hangs:
                worker.cancel(job)
        if hangs:
            logger.error("[%s] makes no progress; killing it", worker.name)
            worker.kill()
