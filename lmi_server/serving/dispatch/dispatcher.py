"""The requests of one model, in its queue and in its workers.

Every accepted job gets exactly one terminal item in its reply slot:

    submit -> waiting in the queue -> in flight on one worker -> ended
                    ^                        |
                    +---- at the head: the worker died before its handler began the job, or the job was recalled;
                          or once, if requests are served concurrently and nothing was sent to the client

A worker whose handler schedules by itself gets some waiting jobs ahead (`JobQueue.lend`). They still wait: they count
as waiting and their time in the queue runs until the worker says that one has a place. If a job comes that has its turn
before them, or if another worker has room, they are recalled.

`max_in_flight` is never exceeded: a place is free again only when the worker's terminal item for it has arrived, or the
worker is dead.

If the handler takes batches, they are formed here (`BatchForming`). `batch_size` waiting jobs, or as many as there are
once the first of them has waited for `max_batch_delay_s`, go to one worker that is idle (or soon will be, see
`BatchProgress.ahead`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Container

from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.histogram import Histogram
from lmi_server.contract.metrics import GAUGE, Metric, MetricSink, drop_metric
from lmi_server.contract.protocol import CANCELLED, RECALLED, Begun, Chunk, End, Error, Frame, Head, Input, Reply
from lmi_server.contract.texts.log_fields import WorkerLogger
from lmi_server.serving.dispatch import deadlines
from lmi_server.serving.dispatch.admission import QueueAdmission
from lmi_server.serving.dispatch.batch_forming import BatchForming
from lmi_server.serving.dispatch.job_queue import JobQueue
from lmi_server.serving.dispatch.lending import Lending
from lmi_server.serving.dispatch.recovery import Recovery
from lmi_server.serving.dispatch.router import Router
from lmi_server.serving.dispatch.service_rate import ServiceRate
from lmi_server.serving.pool_settings import PoolSettings
from lmi_server.serving.roster import WorkerRoster
from lmi_server.supervisor.job import Deadline, Job, ReplySlot
from lmi_server.supervisor.worker_process import WorkerProcess
from lmi_server.supervisor.worker_requests import WorkerRequests

logger = logging.getLogger(__name__)

_PACED_UNREAD = 1 << 20  # unread bytes of one answer, from which on its worker waits
_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_MAX_UNREAD = 64 << 20  # although its worker was told to wait; much more than may be on its way then


class Dispatcher:
    """Gives each waiting request to a worker with room, and the workers' messages to their requests.

    `on_no_room` is called when a request waits, or is refused, because no worker has room for it. `on_metric` gets
    the size of each batch of several requests. `adapters` has the names of the model's adapters. `batch_sizes` has the
    sizes of all batches; if requests are served concurrently, how many a worker had with each that it got. `used_at` is
    when the last request came, by time.monotonic(); without any, when the dispatcher was made.
    """

    def __init__(
        self,
        settings: PoolSettings,
        roster: WorkerRoster,
        on_no_room: Callable[[], None],
        on_metric: MetricSink = drop_metric,
        adapters: Container[str] = frozenset(),
    ) -> None:
        self._queue: JobQueue[Job] = JobQueue(settings.load.model_name, settings.job_queue_size)
        self._rate = ServiceRate()
        self._roster = roster
        self._on_no_room = on_no_room
        self._on_metric = on_metric
        self._dimensions = (("Model", settings.load.model_name),)
        self.used_at = time.monotonic()
        self.batch_sizes = Histogram(_BATCH_SIZES)
        self._ids = itertools.count(1)
        self.router = Router(settings, roster, adapters)
        self._admission = QueueAdmission(
            self._queue, self._rate, roster, self.router, settings.max_queue_delay_s, on_no_room
        )
        self.recovery = Recovery(settings.quarantine_s)
        self.lending = Lending(self._queue, roster, self.router)
        self._idle = asyncio.Event()
        self._draining = False
        self._forming = BatchForming(
            self._queue, settings.job_queue_size, settings.max_batch_delay_s, self.dispatch, lambda: roster.serving
        )

    @property
    def queued(self) -> int:
        return len(self._queue) + len(self.recovery)

    @property
    def in_flight(self) -> int:
        return self._roster.in_flight

    # --- requests ---

    def submit(
        self,
        request: Input,
        on_overflow: Callable[[], None],
        deadline: Deadline | None = None,
        tenant: bytes = b"",
        reply: ReplySlot | None = None,
    ) -> Job:
        """Accept one request.

        Raises QueueFullError, QueueDelayError and QuarantinedError; nothing was accepted then.
        """
        job = Job(next(self._ids), request, on_overflow, deadline, tenant, reply or ReplySlot())
        self.recovery.check(job)
        self.used_at = job.queued_at
        worker = self._worker_at_once(request)
        if worker is None:
            self._queue_up(job)
        elif deadline is None or not deadlines.fail_if_late(job):
            self._send([job], worker)
        if deadline is not None and (not job.sent_at or deadline.ends_running):
            deadlines.watch(job, deadline, self._expire)
        return job

    def _worker_at_once(self, request: Input) -> WorkerProcess | None:
        """Return the worker that gets a request now, None if the request has to go through the queue.

        Where nothing waits and requests are served concurrently, it need not: that is how most requests come.
        """
        if self._rate.is_measuring or self._queue or self.recovery:
            return None
        worker = self.router.worker_for(request)
        return worker if worker is not None and worker.requests.batch_size is None else None

    def _queue_up(self, job: Job) -> None:
        loser = self._admission.admit(job)
        if loser is not None:
            _cancel_in_worker(loser)
        self.lending.make_way(job)
        self.dispatch()

    def cancel(self, job: Job) -> None:
        """Free what `job` holds, because its client went away or it has ended."""
        if job.timer is not None:
            job.timer.cancel()
        if job.cancelled or job.reply.terminal is not None:
            return
        job.cancelled = True
        # The client's side ends now, but the place in the worker is free only once the worker says so. Its time to do
        # that begins here: `put` resets `progressed_at`, by which ProgressWatch finds workers with stuck places.
        job.reply.put(Error(job.id, CANCELLED, "the client went away"), time.monotonic())
        if not self.recovery.withdraw(job):
            self._queue.remove(job)
        self._go_on_without(job)

    def _go_on_without(self, job: Job) -> None:
        """Have the worker drop `job`, which has ended; it may have been what a suspect, or the end, waited for."""
        _cancel_in_worker(job)
        if self.recovery:
            self.dispatch()
        self._check_idle()

    def dispatch(self) -> None:
        """Send as many waiting jobs as the workers have room for."""
        while (suspect := self.recovery.next_suspect()) is not None:
            self._put_back(suspect)
        queue = self._queue
        while queue.has_next:
            worker = self.router.worker_for(queue.peek().request)
            if worker is None:
                self._rate.begin(time.monotonic())
                self._on_no_room()
                self.lending.lend()
                return
            size = worker.requests.batch_size or 1
            if not self._forming.is_due(size):
                break
            popped = [queue.pop() for _ in range(min(size, len(queue)))]
            jobs = [job for job in popped if job.deadline is None or not deadlines.fail_if_late(job)]
            if jobs:
                self._send(jobs, worker)
        if queue.lent:
            self.lending.balance()
        elif self._rate.is_measuring:
            self._rate.end(time.monotonic())
        self._check_idle()

    def _send(self, jobs: list[Job], worker: WorkerProcess) -> None:
        """Send one batch."""
        for job in jobs:
            self.router.record(job.request, worker)
        requests = worker.requests
        requests.submit(jobs)
        if requests.batch_size is None:
            self.batch_sizes.observe(requests.running)
        else:
            self.batch_sizes.observe(len(jobs))
            self._forming.watch_delayed()
        if len(jobs) > 1:
            self._on_metric(Metric("DynamicBatchSize", "Count/Item", len(jobs), self._dimensions, GAUGE))

    def resume(self) -> None:
        """Send waiting requests to a worker that has just become ready. From now on requests end at another rate."""
        self._rate.forget()
        self.dispatch()

    def _expire(self, job: Job, deadline: Deadline) -> None:
        """End `job`, whose timer has run off."""
        if deadline.at > time.monotonic():  # timers may be early by a millisecond
            deadlines.watch(job, deadline, self._expire)
        elif self.recovery.withdraw(job) or self._queue.remove(job):  # it waits
            deadlines.fail_if_late(job)
            self._go_on_without(job)
        elif deadline.ends_running and job.reply.terminal is None and job.holder is not None:
            deadlines.fail_running(job, deadline)
            _cancel_in_worker(job)

    # --- answers ---

    def on_items(self, worker: WorkerProcess, items: list[Frame]) -> None:
        """Give each item to the request that it belongs to. This runs for every token of every request."""
        requests = worker.requests
        in_flight = requests.in_flight
        now = time.monotonic()
        recalled: list[Job] = []
        served = 0
        moved = False
        for item in items:
            job = in_flight.get(item.id)
            if job is None:
                if not worker.controls.settle(item):
                    WorkerLogger(logger, worker.name).error(
                        "sent a %s for request %d, which it does not hold", item, item.id
                    )
                continue
            requests.progressed_at = now
            if not isinstance(item, Chunk):  # most items are chunks
                if isinstance(item, Begun):
                    self.lending.begin(job, worker, now)
                    self.batch_sizes.observe(requests.running)
                    moved = True
                    continue
                if not isinstance(item, Head):
                    requests.remove(job)
                    moved = True
                    if isinstance(item, Error) and item.kind == RECALLED:
                        recalled.append(job)
                        continue
                    if job.is_ahead:  # refused, or cancelled, before it had a place
                        self._queue.remove(job)
                    else:
                        self._rate.add_service(now - job.sent_at)
                        served += 1
                if self.router.sessions is not None and isinstance(item, Reply | Head):
                    self.router.sessions.read_answer(item.headers, worker)
                if isinstance(item, Reply | End):
                    requests.has_answered = True
                    if job.fingerprint is not None:
                        self.recovery.acquit(job.fingerprint)
            reply = job.reply
            reply.put(item, now)
            if reply.unread > _PACED_UNREAD:
                self._pace(requests, job)
        # Each goes to the head of the queue, so the oldest must be last.
        for job in sorted(recalled, key=lambda job: -job.id):
            self._requeue(job)
        if served and self._rate.is_measuring:
            self._rate.add_ended(served, self.router.places, now)
        if moved:
            self.dispatch()

    def _pace(self, requests: WorkerRequests, job: Job) -> None:
        """Have the worker wait for the client of `job`; give it up if the worker does not wait."""
        if not job.reply.is_held:
            requests.hold(job, held=True)
        elif job.reply.unread > _MAX_UNREAD and not job.cancelled:
            logger.warning(
                "request %s: its client has left %d bytes of the answer unread; cancelled, the connection is closed",
                *(job.request.request_id, job.reply.unread),
            )
            self.cancel(job)
            job.on_overflow()

    # --- workers that go ---

    def take_back(self, worker: WorkerProcess) -> None:
        """Take the jobs of a dead worker: retry what no client has seen a byte of, and fail the rest."""
        self.router.forget(worker)
        for job in self.recovery.take_from(worker):  # each goes to the head of the queue, so the oldest is last
            self._requeue(job)
        self.dispatch()

    def _requeue(self, job: Job) -> None:
        self._queue.remove(job)  # if a worker had it ahead
        if job.reply.terminal is None:
            self.recovery.come_back(job)
            self._put_back(job)

    def _put_back(self, job: Job) -> None:
        """Put `job` at the head of the queue, unless it has ended or its deadline has passed."""
        if job.reply.terminal is not None:
            return
        self.lending.make_way(job)
        if not deadlines.fail_if_late(job):
            self._queue.push_front(job)
            if job.deadline is not None and job.timer is None:
                deadlines.watch(job, job.deadline, self._expire)

    # --- the end ---

    async def until_idle(self) -> None:
        """Wait until nothing waits and nothing is in flight. No request may be submitted from now on."""
        self._draining = True
        self._check_idle()
        await self._idle.wait()

    def refuse_queue(self, error: LmiServerError) -> None:
        """Fail every request that waits in no worker."""
        while self._queue.has_next:
            self._queue.pop().fail(error)
        self.recovery.fail_suspects(error)
        self._check_idle()

    def fail_all(self, error: LmiServerError) -> None:
        """Fail every request that waits or is in flight."""
        self._forming.stop()
        self.refuse_queue(error)
        for worker in self._roster.serving:
            for job in worker.requests.in_flight.values():
                job.fail(error)
                worker.requests.cancel(job)

    def abort(self, error: LmiServerError, request_ids: Collection[str] | None = None) -> int:
        """End accepted requests with `error`, all or those with one of these ids; return how many.

        The place of one that runs is free once its worker says so.
        """
        running = (job for worker in self._roster.serving for job in worker.requests.in_flight.values())
        jobs = {job.id: job for job in (*self._queue, *self.recovery, *running)}
        chosen = [job for job in jobs.values() if request_ids is None or job.request.request_id in request_ids]
        ended = [job for job in chosen if job.reply.terminal is None]
        for job in ended:
            job.fail(error)
            if not self.recovery.withdraw(job):
                self._queue.remove(job)
            self._go_on_without(job)
        return len(ended)

    def _check_idle(self) -> None:
        if self._draining and not self._queue and not self.recovery and not self.in_flight:
            self._idle.set()


def _cancel_in_worker(job: Job) -> None:
    """Have the worker that has `job`, if one does, drop it."""
    if job.holder is not None:
        job.cancelled = True
        job.holder.cancel(job)
