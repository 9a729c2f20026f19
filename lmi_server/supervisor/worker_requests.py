"""The requests that one worker holds: its open requests, and their progress."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence

from lmi_server.contract.errors import WorkerDiedError
from lmi_server.contract.link import WorkerLink
from lmi_server.contract.protocol import Cancel, Command, Control, Error, Frame, Hold, Recall, Reply, Submit, Waiting
from lmi_server.supervisor.job import Job
from lmi_server.supervisor.launch.worker_launch import WorkerLaunch

_RECALL_AFTER_S = 0.02  # a batch that runs for longer than this counts as slow


class WorkerRequests:
    """The requests of one worker.

    `in_flight` has its jobs by id; those of `ahead` wait there for a place, up to `window` of them. `batch_size` is the
    number of requests that its handler takes at once, one such batch after the other; None if it serves requests
    concurrently. `has_answered` is set once an answer is complete.
    `progressed_at` (time.monotonic()) is the last time at which the worker went on with any request, or got one while
    it had none.
    """

    def __init__(self, link: WorkerLink, launch: WorkerLaunch) -> None:
        self.in_flight: dict[int, Job] = {}
        self.ahead: dict[int, Job] = {}
        self.window = 0
        self.batch_size: int | None = None
        self.has_answered = False
        self.progressed_at = time.monotonic()
        self._link = link
        self._launch = launch
        self._batches: Counter[int] = Counter()  # the number of requests in flight of each batch, by its number
        self._sent_batches = 0
        self._reported_waiting = 0

    @property
    def running(self) -> int:
        """Return the number of jobs that have a place."""
        return len(self.in_flight) - len(self.ahead)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Send one batch."""
        now = time.monotonic()
        if not self.in_flight:
            self.progressed_at = now  # the worker owed nothing until now
        self._sent_batches += 1
        self._batches[self._sent_batches] = len(jobs)
        for job in jobs:
            job.start(self, self._sent_batches, now)
            self.in_flight[job.id] = job
            self._link.send(Submit(job.id, job.request, more=job is not jobs[-1]))

    def submit_ahead(self, job: Job) -> None:
        """Send a job that the worker has no place for yet."""
        job.go_ahead(self)
        self.in_flight[job.id] = self.ahead[job.id] = job
        self._link.send(Submit(job.id, job.request, ahead=True))

    def begin(self, job: Job, now: float) -> None:
        """Record that a job sent ahead has a place at `now`."""
        del self.ahead[job.id]
        job.begin(now)
        self._sent_batches += 1
        job.batch = self._sent_batches
        self._batches[job.batch] = 1

    def remove(self, job: Job) -> None:
        """Remove `job`, which has ended."""
        del self.in_flight[job.id]
        if job.is_ahead:
            del self.ahead[job.id]
            return
        self._batches[job.batch] -= 1
        if not self._batches[job.batch]:
            del self._batches[job.batch]

    def cancel(self, job: Job) -> None:
        """Ask the worker to free the place of `job`. The place is free once the terminal item of `job` arrives."""
        self._link.send(Cancel(job.id))

    def recall(self, job: Job) -> None:
        """Ask the worker to give back a job that it got ahead."""
        if not job.is_recalled:
            job.is_recalled = True
            self._link.send(Recall(job.id))

    def recall_ahead(self) -> None:
        """Ask for every job that waits in the worker; the newest comes back first, to the head of the queue."""
        for job in reversed(self.ahead.values()):
            self.recall(job)

    def report_waiting(self, requests: int) -> None:
        """Tell a worker with a window how many requests wait outside of it."""
        if self.window and requests != self._reported_waiting:
            self._reported_waiting = requests
            self._link.send(Waiting(requests))

    def hold(self, job: Job, held: bool) -> None:
        """Have the worker stop the stream of `job`, or let it go on."""
        job.reply.is_held = held
        self._link.send(Hold(job.id, held))

    def takes_batch(self, now: float) -> bool:
        """Return whether the worker gets another batch: one at a time, more if its handler is fast."""
        return len(self._batches) <= (self._launch.progress.ahead(now) if self._batches else 0)

    def has_begun(self, job: Job) -> bool:
        """Return whether the handler has seen `job`. The answer is right for a dead worker too."""
        return not job.is_ahead and (self.batch_size is None or job.batch <= self._launch.progress.begun)

    def recall_delayed(self, now: float) -> bool:
        """Recall the jobs behind a batch that takes long. Return False if nothing waits behind another batch."""
        if len(self._batches) <= 1:
            return False
        if self._launch.progress.running_s(now) > _RECALL_AFTER_S:
            for job in self.in_flight.values():
                if not self.has_begun(job):
                    self._link.send(Recall(job.id))
        return True

    def note_progress(self, job_ids: Sequence[int]) -> None:
        """Record that the handler has gone on with these requests since the worker's last report.

        The front end sees nothing of an answer in one piece before its end: the worker reports it.
        """
        now = time.monotonic()
        for job_id in job_ids:
            job = self.in_flight.get(job_id)
            if job is not None:
                job.reply.progressed_at = self.progressed_at = now

    def take_all(self) -> list[Job]:
        """Remove and return every job, oldest first: the worker is dead."""
        jobs = list(self.in_flight.values())
        self.in_flight.clear()
        self.ahead.clear()
        self._batches.clear()
        return jobs


class ControlCalls:
    """The calls to one worker. Their ids are negative, unlike those of requests."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        self._ids = itertools.count(-1, -1)
        self._pending: dict[int, asyncio.Future[Reply | Error | None]] = {}
        self._dead = False

    async def call(self, command: Command) -> bytes:
        """Send `command` to the worker and return the answer.

        Raises the error with which the worker answers, or WorkerDiedError.
        """
        died = WorkerDiedError(f"The worker process ended during {command.operation}")
        if self._dead:
            raise died
        call_id = next(self._ids)
        outcome: asyncio.Future[Reply | Error | None] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = outcome
        self._link.send(Control(call_id, command))
        try:
            answer = await outcome
        finally:
            del self._pending[call_id]
        if answer is None:
            raise died
        if isinstance(answer, Error):
            raise answer.exception()
        return answer.data

    def settle(self, item: Frame) -> bool:
        """Take the answer to a call; return False if `item` does not belong to a call."""
        if item.id >= 0:
            return False
        outcome = self._pending.get(item.id)  # None if the caller has stopped waiting
        if outcome is not None and not outcome.done():
            assert isinstance(item, Reply | Error), "a worker answers a Control with one of these"
            outcome.set_result(item)
        return True

    def fail_all(self) -> None:
        """End every call, and each that is still to come, with WorkerDiedError: the worker is dead."""
        self._dead = True
        for outcome in self._pending.values():
            if not outcome.done():
                outcome.set_result(None)
