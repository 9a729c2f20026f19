"""The fate of the requests of a dead worker: they are tried again, or fail, and the guilty are quarantined."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence

from lmi_server.contract.errors import LmiServerError
from lmi_server.serving.dispatch.quarantine import Quarantine, fingerprint
from lmi_server.supervisor.job import Job
from lmi_server.supervisor.worker_process import WorkerProcess

logger = logging.getLogger(__name__)


class Recovery:
    """Decides which jobs of dead workers are tried again. `retries` counts requests that were sent again.

    A job that the handler had not begun cannot have killed the worker: it may be tried as often as needed. One that was
    running may have: it gets one more try. If several have had that, all but one are innocent. These suspects are held
    back and run one at a time, so that the guilty one dies without the others. A running batch is not tried again,
    because its requests may have had effects outside the pool.
    """

    def __init__(self, quarantine_s: float) -> None:
        self.retries = 0
        self._quarantine = Quarantine(quarantine_s)
        self._suspects: deque[Job] = deque()  # that are held back
        self._running_suspect: Job | None = None

    def __len__(self) -> int:
        """Return how many suspects are held back."""
        return len(self._suspects)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._suspects)

    def check(self, job: Job) -> None:
        """Raise QuarantinedError for a request that has ended workers before."""
        if self._quarantine:
            job.fingerprint = self._quarantine.check(job.request, time.monotonic())

    def acquit(self, answered: bytes) -> None:
        """Forget a request that was answered; `answered` is its fingerprint."""
        self._quarantine.acquit(answered)

    def take_from(self, worker: WorkerProcess) -> list[Job]:
        """Take the jobs of a dead worker; return those to be tried again, the newest first, and fail the rest."""
        jobs = worker.requests.take_all()
        began = [job for job in jobs if worker.requests.has_begun(job)]
        if not worker.is_retiring:
            self._suspect([job for job in began if not job.cancelled])
        suspects = sum(job.deaths > 0 for job in began if job.reply.terminal is None)
        return [job for job in reversed(jobs) if self._is_tried_again(worker, job, suspects)]

    def _suspect(self, jobs: Sequence[Job]) -> None:
        """Record that a worker died while it served `jobs`."""
        for job in jobs:
            job.fingerprint = fingerprint(job.request)
        quarantined = self._quarantine.record([job.fingerprint for job in jobs if job.fingerprint], time.monotonic())
        for job in jobs:
            if job.fingerprint == quarantined:
                logger.error("request %s has ended its worker twice; it is quarantined", job.request.request_id)

    def _is_tried_again(self, worker: WorkerProcess, job: Job, suspects: int) -> bool:
        """Return whether `job` goes back to the queue at once; otherwise hold it back, or fail it.

        `suspects` is how many of the running jobs had been running in another worker that died.
        """
        if not worker.requests.has_begun(job):
            job.may_go_ahead = not job.is_ahead
            return True
        if job.reply.terminal is not None:
            return False
        job.deaths += 1
        if job.reply.head is None and worker.requests.batch_size is None:
            if job.deaths == 1:
                return True
            if job.deaths == 2 and suspects > 1:
                self.come_back(job)
                self._suspects.appendleft(job)
                return False
        job.fail(worker.cause)
        return False

    def come_back(self, job: Job) -> None:
        """Record that a worker has `job` no more."""
        if not job.is_ahead:
            self.retries += 1
            job.attempts = (*job.attempts, (job.sent_at, time.monotonic()))
        job.come_back()

    def next_suspect(self) -> Job | None:
        """Return a suspect that may run now, None while another suspect runs."""
        running = self._running_suspect
        if not self._suspects or (running is not None and running.reply.terminal is None):
            return None
        self._running_suspect = self._suspects.popleft()
        return self._running_suspect

    def withdraw(self, job: Job) -> bool:
        """Take `job` out of the suspects that are held back; return whether it was there."""
        if job not in self._suspects:
            return False
        self._suspects.remove(job)
        return True

    def fail_suspects(self, error: LmiServerError) -> None:
        while self._suspects:
            self._suspects.popleft().fail(error)
