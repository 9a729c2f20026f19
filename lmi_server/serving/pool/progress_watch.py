"""Gives up requests without progress, and workers that hang."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmi_server.contract.errors import PredictTimeoutError
from lmi_server.contract.texts.log_fields import WorkerLogger
from lmi_server.supervisor.job import Job

if TYPE_CHECKING:
    from lmi_server.supervisor.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

_CHECKS_PER_TIMEOUT = 4  # how finely the shortest timeout is watched
_LONGEST_PAUSE_S = 1.0


class ProgressWatch:
    """Checks every request in flight several times within `shortest_s`, from `start` to `stop`.

    A request without progress for `predict_timeout_s` fails. `workers` returns the workers that serve. `on_check` is
    called with the time (time.monotonic()) at each check.
    """

    def __init__(
        self,
        predict_timeout_s: float,
        shortest_s: float,
        workers: Callable[[], Sequence[WorkerProcess]],
        on_check: Callable[[float], None],
    ) -> None:
        self._timeout_s = predict_timeout_s
        self._pause_s = min(_LONGEST_PAUSE_S, shortest_s / _CHECKS_PER_TIMEOUT)
        self._workers = workers
        self._on_check = on_check
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._check_all)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_all(self) -> None:
        now = time.monotonic()
        for worker in self._workers():
            overdue = [job for job in worker.requests.in_flight.values() if self._is_overdue(worker, job, now)]
            if overdue:
                self._give_up(worker, overdue, now)
        self._on_check(now)
        self.start()

    def _is_overdue(self, worker: WorkerProcess, job: Job, now: float) -> bool:
        if job.reply.is_held or not worker.requests.has_begun(job):
            job.reply.progressed_at = now  # it waits for its client, or behind another batch: its time does not run
        return now - job.reply.progressed_at >= self._timeout_s

    def _give_up(self, worker: WorkerProcess, overdue: Sequence[Job], now: float) -> None:
        """Fail `overdue`, and kill the worker if it hangs.

        A worker that goes on with other requests is left alone. It hangs if it goes on with none, or if it does not
        free the place of a request that was cancelled before: the place would be lost for ever.
        """
        hangs = now - worker.requests.progressed_at >= self._timeout_s or any(job.cancelled for job in overdue)
        error = PredictTimeoutError(f"The request made no progress within predict_timeout={self._timeout_s:g} seconds")
        for job in overdue:
            request_id = job.request.request_id
            logger.error("request %s: no progress for %g seconds; it is given up", request_id, self._timeout_s)
            job.fail(error)
            job.cancelled = True
            job.reply.progressed_at = now  # the worker has as much time again to free the place
            if not hangs:
                worker.requests.cancel(job)
        if hangs:
            WorkerLogger(logger, worker.name).error("makes no progress; killing it")
            worker.kill()
