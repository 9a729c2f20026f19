"""The requests of one model: those that wait in its queue and those that its workers hold.

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
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from lmi_server.contract.errors import DeadlineError, LmiServerError, QueueDelayError, QueueFullError
from lmi_server.contract.histogram import Histogram
from lmi_server.contract.log_fields import WorkerLogger
from lmi_server.contract.metrics import GAUGE, Metric, MetricSink, unrecorded
from lmi_server.contract.protocol import (
    ADAPTER_HEADER,
    CANCELLED,
    RECALLED,
    Begun,
    Chunk,
    End,
    Error,
    Frame,
    Head,
    Input,
    Reply,
)
from lmi_server.serving.dispatch.adapter_affinity import AdapterAffinity
from lmi_server.serving.dispatch.batch_forming import BatchForming
from lmi_server.serving.dispatch.job_queue import JobQueue
from lmi_server.serving.dispatch.prefix_affinity import PrefixAffinity
from lmi_server.serving.dispatch.quarantine import Quarantine, fingerprint
from lmi_server.serving.dispatch.roster import WorkerRoster
from lmi_server.serving.dispatch.service_rate import ServiceRate, retry_after
from lmi_server.serving.dispatch.sticky_sessions import StickySessions
from lmi_server.serving.pool_settings import PoolSettings
from lmi_server.supervisor.job import Deadline, Job, ReplySlot
from lmi_server.supervisor.worker_process import WorkerProcess
from lmi_server.supervisor.worker_requests import WorkerRequests

logger = logging.getLogger(__name__)

_PACED_UNREAD = 1 << 20  # bytes of one answer that its client has not read yet, from which on its worker waits
_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_MAX_UNREAD = 64 << 20  # although its worker was told to wait; much more than may be on its way then


class Dispatcher:
    """Gives each waiting request to a worker with room, and what workers send to the request that it belongs to.

    `on_no_room` is called when a request waits, or is refused, because no worker has room for it. `on_metric` gets
    the size of each batch of several requests. `batch_sizes` has the sizes of all batches; if requests are served
    concurrently, how many a worker had with each that it got. `retries` counts requests that were sent again.
    """

    def __init__(
        self,
        settings: PoolSettings,
        roster: WorkerRoster,
        on_no_room: Callable[[], None],
        on_metric: MetricSink = unrecorded,
    ) -> None:
        self._queue: JobQueue[Job] = JobQueue(settings.load.model_name, settings.job_queue_size)
        self._max_in_flight = settings.max_in_flight
        self._max_queue_delay_s = settings.max_queue_delay_s
        self._rate = ServiceRate()
        self._roster = roster
        self._on_no_room = on_no_room
        self._on_metric = on_metric
        self._dimensions = (("Model", settings.load.model_name),)
        self.used_at = time.monotonic()
        self.batch_sizes = Histogram(_BATCH_SIZES)
        self.retries = 0
        self._ids = itertools.count(1)
        self._sessions = StickySessions() if settings.sessions else None
        self._prefixes: PrefixAffinity[WorkerProcess] | None = PrefixAffinity() if settings.prefix_affinity else None
        most = settings.adapter_affinity
        self._adapters: AdapterAffinity[WorkerProcess] | None = AdapterAffinity(most) if most else None
        self._quarantine = Quarantine(settings.quarantine_s)
        self._held_back: deque[Job] = deque()  # two workers died of one of these; see _retry_or_fail
        self._lone: Job | None = None  # the one of them that runs
        self._idle = asyncio.Event()
        self._draining = False
        self._forming = BatchForming(
            self._queue, settings.job_queue_size, settings.max_batch_delay_s, self.dispatch, lambda: roster.serving
        )

    @property
    def queued(self) -> int:
        return len(self._queue) + len(self._held_back)

    @property
    def in_flight(self) -> int:
        return sum(worker.requests.running for worker in self._roster.serving)

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
        job = Job(next(self._ids), request, on_overflow, deadline, tenant, reply)
        if self._quarantine:
            job.fingerprint = self._quarantine.check(request, time.monotonic())
        if self._max_queue_delay_s is not None:
            self._check_delay(job, self._max_queue_delay_s)
        self._push(job)
        self.dispatch()
        if deadline is not None and (not job.sent_at or deadline.ends_running):
            self._watch_deadline(job, deadline)
        return job

    def _push(self, job: Job) -> None:
        """Put `job` into the queue. Raises QueueFullError."""
        self.used_at = job.queued_at
        try:
            loser = self._queue.push(job)
        except QueueFullError as error:
            raise self._with_retry_after(error, job.queued_at) from None
        if loser is not None:
            refusal = QueueFullError("The queue is full, and this API key has most of the requests in it")
            loser.fail(self._with_retry_after(refusal, job.queued_at))
            self._cancel_held(loser)
        self._make_way(job)

    def _with_retry_after(self, error: QueueFullError, now: float) -> QueueFullError:
        """Return the error with the seconds until the next request leaves the queue."""
        error.retry_after = retry_after(self._wait_s(0, now))
        return error

    def _check_delay(self, job: Job, allowed_s: float) -> None:
        """Raise QueueDelayError if `job` would wait for longer than `allowed_s`."""
        if not self._roster.ready:
            return
        if not self._rate.is_measuring:
            if self._queue or self._worker_for(job) is not None:  # what waits although there is room forms a batch
                return
            self._rate.begin(job.queued_at)
        wait_s = self._wait_s(self._queue.ahead_of(job), job.queued_at)
        if wait_s is not None and wait_s > allowed_s:
            self._on_no_room()
            error = QueueDelayError(
                f"The request would wait for about {wait_s:.1f} seconds, and option.max_queue_delay_ms="
                f"{allowed_s * 1000:.0f} allows no more than {allowed_s:g}; send it again later"
            )
            error.retry_after = retry_after(wait_s - allowed_s)
            raise error

    def cancel(self, job: Job) -> None:
        """Free what `job` holds, because its client went away or it has ended."""
        if job.timer is not None:
            job.timer.cancel()
        if job.cancelled or job.reply.terminal is not None:
            return
        job.cancelled = True
        # The client's side ends now, but the place in the worker is free only once the worker says so. Its time to do
        # that begins here: `put` resets `progressed_at`, by which ProgressWatch finds workers that never free it.
        job.reply.put(Error(job.id, CANCELLED, "the client went away"), time.monotonic())
        if self._withdraw(job):
            self._check_idle()
        self._cancel_held(job)
        if self._held_back:
            self.dispatch()

    def _withdraw(self, job: Job) -> bool:
        """Take `job` out of what waits; return whether it was there."""
        if job in self._held_back:
            self._held_back.remove(job)
            return True
        return self._queue.remove(job)

    @staticmethod
    def _cancel_held(job: Job) -> None:
        """Have the worker that has `job`, if one does, drop it."""
        if job.holder is not None:
            job.cancelled = True
            job.holder.cancel(job)

    def dispatch(self) -> None:
        """Send as many waiting jobs as the workers have room for."""
        while self._held_back and (self._lone is None or self._lone.reply.terminal is not None):
            self._lone = self._held_back.popleft()
            self._put_back(self._lone)
        while self._queue.has_next:
            worker = self._worker_for(self._queue.peek())
            if worker is None:
                self._rate.begin(time.monotonic())
                self._on_no_room()
                self._lend()
                return
            requests = worker.requests
            size = requests.batch_size or 1
            if not self._forming.is_due(size):
                break
            popped = [self._queue.pop() for _ in range(min(size, len(self._queue)))]
            jobs = [job for job in popped if job.deadline is None or not self._drop_late(job, job.deadline)]
            if not jobs:
                continue
            for job in jobs:
                self._remember(job.request, worker)
            requests.submit(jobs)
            if requests.batch_size is None:
                self.batch_sizes.observe(requests.running)
            else:
                self.batch_sizes.observe(len(jobs))
                self._forming.watch_delayed()
            if len(jobs) > 1:
                self._on_metric(Metric("DynamicBatchSize", "Count/Item", len(jobs), self._dimensions, GAUGE))
        if self._queue.lent:
            self._balance()
        elif self._rate.is_measuring:
            self._rate.end(time.monotonic())
        self._check_idle()

    def _remember(self, request: Input, worker: WorkerProcess) -> None:
        """Record where a request goes, for those that are like it."""
        if self._sessions is not None:
            self._sessions.sent(request, worker)
        if self._prefixes is not None:
            self._prefixes.sent(request.body(), worker)
        if self._adapters is not None and (adapter := request.properties.get(ADAPTER_HEADER)):
            self._adapters.sent(adapter, worker)

    def resume(self) -> None:
        """Send what waits to a worker that has just become ready. From now on requests end at another rate."""
        self._rate.forget()
        self.dispatch()

    def _worker_for(self, job: Job) -> WorkerProcess | None:
        """Return the worker that `job` goes to: that of its session if it has room, otherwise the least loaded one.

        A worker that has its adapter, and one that knows the beginning of the request, come before the least loaded
        one if the settings say so.
        """
        sticky = self._owner(job)
        if sticky is not None and self._has_room(sticky.requests):
            return sticky
        if self._prefixes is None:
            return self._least_loaded()
        able = [worker for worker in self._roster.ready if self._has_room(worker.requests)]
        held: Mapping[WorkerProcess, int] = {worker: len(worker.requests.in_flight) for worker in able}
        if self._adapters is not None and (adapter := job.request.properties.get(ADAPTER_HEADER)):
            held = self._adapters.narrowed(adapter, held)
        return self._prefixes.choose(job.request.body(), held)

    def _owner(self, job: Job) -> WorkerProcess | None:
        """Return the worker of the session that a request belongs to; None if there is none."""
        return None if self._sessions is None else self._sessions.worker_of(job.request)

    def _least_loaded(self) -> WorkerProcess | None:
        best: WorkerProcess | None = None
        least = sys.maxsize
        for worker in self._roster.ready:
            held = len(worker.requests.in_flight)
            if held < least and self._has_room(worker.requests):
                best, least = worker, held
        return best

    # --- jobs that wait in a worker ---

    def _lend(self) -> None:
        """Let workers have waiting jobs ahead, each as many as its window has room for."""
        while self._queue.may_lend and self._queue.peek().may_go_ahead:
            requests = self._window_for(self._queue.peek())
            if requests is None:
                return
            requests.submit_ahead(self._queue.lend())

    def _window_for(self, job: Job) -> WorkerRequests | None:
        """Return where `job` may wait: with the worker of its session, otherwise the least loaded one."""
        able = [worker for worker in self._roster.ready if len(worker.requests.ahead) < worker.requests.window]
        sticky = self._owner(job)
        if sticky is not None and sticky in able:
            return sticky.requests
        return min((worker.requests for worker in able), key=lambda held: len(held.in_flight), default=None)

    def _make_way(self, job: Job) -> None:
        """Recall the jobs that workers have ahead if `job` may have its turn before them."""
        if self._queue.overtakes_lent(job):
            for worker in self._roster.serving:
                worker.requests.recall_ahead()

    def _balance(self) -> None:
        """Recall jobs from workers without room for as many places as others have free; nothing else waits."""
        free = [self._max_in_flight - len(worker.requests.in_flight) for worker in self._roster.ready]
        places = sum(count for count in free if count > 0)
        full = [job for job in self._queue.lent if job.holder is not None and not self._has_room(job.holder)]
        for job in full[-places:] if places else ():
            if job.holder is not None:
                job.holder.recall(job)

    def report_waiting(self) -> None:
        """Tell the workers that have jobs ahead how many others wait."""
        waiting = len(self._queue) - len(self._queue.lent)
        for worker in self._roster.ready:
            worker.requests.report_waiting(waiting)

    def _wait_s(self, ahead: int, now: float) -> float | None:
        """Return how long a request waits that has `ahead` others before it; None if that is not known."""
        return self._rate.wait_s(ahead, self.in_flight, now)

    def _places(self) -> int:
        """Return how many requests the workers take at a time."""
        return sum(worker.requests.batch_size or self._max_in_flight for worker in self._roster.ready)

    def _has_room(self, requests: WorkerRequests) -> bool:
        if requests.batch_size is None:
            return len(requests.in_flight) < self._max_in_flight
        return requests.takes_batch(time.monotonic())

    # --- deadlines ---

    def _watch_deadline(self, job: Job, deadline: Deadline) -> None:
        left_s = deadline.at - time.monotonic()
        job.timer = asyncio.get_running_loop().call_later(max(left_s, 0), self._expire, job, deadline)

    def _drop_late(self, job: Job, deadline: Deadline) -> bool:
        """Fail `job`, which has left the queue, if its deadline has passed; return whether it has."""
        if deadline.at > time.monotonic():
            return False
        job.fail(
            DeadlineError(
                f"The request waited in the queue until its deadline ({deadline.text} seconds) had passed;"
                " allow more time, or send it again later"
            )
        )
        return True

    def _expire(self, job: Job, deadline: Deadline) -> None:
        """End `job`, whose timer has run off."""
        if deadline.at > time.monotonic():  # timers may be early by a millisecond
            self._watch_deadline(job, deadline)
        elif self._withdraw(job):
            self._drop_late(job, deadline)
            self._cancel_held(job)
            self._check_idle()
            if self._held_back:
                self.dispatch()
        elif deadline.ends_running and job.reply.terminal is None and job.holder is not None:
            job.fail(
                DeadlineError(
                    f"The request was not done by its deadline ({deadline.text} seconds) and is cancelled;"
                    " allow more time, or ask for fewer tokens"
                )
            )
            self._cancel_held(job)

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
                    self._begin(job, worker, now)
                    moved = True
                    continue
                if not isinstance(item, Head):
                    requests.ended(job)
                    moved = True
                    if isinstance(item, Error) and item.kind == RECALLED:
                        recalled.append(job)
                        continue
                    if job.is_ahead:  # refused, or cancelled, before it had a place
                        self._queue.remove(job)
                    else:
                        self._rate.served(now - job.sent_at)
                        served += 1
                if self._sessions is not None and isinstance(item, Reply | Head):
                    self._sessions.answered(item.headers, worker)
                if isinstance(item, Reply | End):
                    requests.has_answered = True
                    if job.fingerprint is not None:
                        self._quarantine.acquit(job.fingerprint)
            reply = job.reply
            reply.put(item, now)
            if reply.unread > _PACED_UNREAD:
                self._pace(requests, job)
        if recalled:
            # Each goes to the head of the queue, so the oldest must be last.
            for job in sorted(recalled, key=lambda job: -job.id):
                self._requeue(job)
        if served and self._rate.is_measuring:
            self._rate.ended(served, self._places(), now)
        if moved:
            self.dispatch()

    def _begin(self, job: Job, worker: WorkerProcess, now: float) -> None:
        """Record that a worker has a place for a job that it got ahead."""
        worker.requests.begun(job, now)
        self._queue.remove(job)
        self._remember(job.request, worker)
        self.batch_sizes.observe(worker.requests.running)

    def _pace(self, requests: WorkerRequests, job: Job) -> None:
        """Have the worker wait for the client of `job`; give it up if the worker does not wait."""
        if not job.reply.is_held:
            requests.hold(job, held=True)
        elif job.reply.unread > _MAX_UNREAD:
            self._overflow(job)

    def _overflow(self, job: Job) -> None:
        if job.cancelled:
            return
        logger.warning(
            "request %s: its client has left %d bytes of the answer unread; cancelled, the connection is closed",
            *(job.request.request_id, job.reply.unread),
        )
        self.cancel(job)
        job.on_overflow()

    # --- workers that go ---

    def forget_sessions(self, worker: WorkerProcess) -> None:
        """Let the sessions of a worker that takes no more requests go to any other worker."""
        if self._sessions is not None:
            self._sessions.forget(worker)
        if self._prefixes is not None:
            self._prefixes.forget(worker)
        if self._adapters is not None:
            self._adapters.forget(worker)

    def take_back(self, worker: WorkerProcess) -> None:
        """Take the jobs of a dead worker: retry those of which no client has seen a byte, and fail the rest."""
        self.forget_sessions(worker)
        jobs = worker.requests.take_all()
        if not worker.is_retiring:
            self._suspect([job for job in jobs if not job.cancelled and worker.requests.has_begun(job)])
        began = [job for job in jobs if job.reply.terminal is None and worker.requests.has_begun(job)]
        suspects = sum(job.deaths > 0 for job in began)
        for job in reversed(jobs):  # each goes to the head of the queue, so the oldest must be last
            self._retry_or_fail(worker, job, suspects)
        self.dispatch()

    def _suspect(self, jobs: Sequence[Job]) -> None:
        """Record that a worker died while it served `jobs`."""
        for job in jobs:
            job.fingerprint = fingerprint(job.request)
        quarantined = self._quarantine.record([job.fingerprint for job in jobs if job.fingerprint], time.monotonic())
        for job in jobs:
            if job.fingerprint == quarantined:
                logger.error("request %s has ended its worker twice; it is quarantined", job.request.request_id)

    def _retry_or_fail(self, worker: WorkerProcess, job: Job, suspects: int) -> None:
        """Put `job` back into the queue, or fail it.

        `suspects` is how many of those that were running had been there when another worker died.

        A job that the handler had not begun cannot have killed the worker, so that it may be tried as often as needed.
        One that was running may have: it gets one more try. If several have had that, all but one are innocent. They
        get another try, but only one of them runs at a time, so that the guilty one dies without the others. A batch
        that was running is not tried again, because its requests may have had effects that the pool knows nothing of.
        """
        requests = worker.requests
        if not requests.has_begun(job):
            job.may_go_ahead = not job.is_ahead
            self._requeue(job)
            return
        if job.reply.terminal is not None:
            return
        job.deaths += 1
        if job.reply.head is not None or requests.batch_size is not None:
            job.fail(worker.cause)
        elif job.deaths == 1:
            self._requeue(job)
        elif job.deaths == 2 and suspects > 1:
            self._come_back(job)
            self._held_back.appendleft(job)
        else:
            job.fail(worker.cause)

    def _requeue(self, job: Job) -> None:
        self._queue.remove(job)  # if a worker had it ahead
        if job.reply.terminal is None:
            self._come_back(job)
            self._put_back(job)

    def _come_back(self, job: Job) -> None:
        """Record that a worker has `job` no more."""
        if not job.is_ahead:
            self.retries += 1
            job.attempts = (*job.attempts, (job.sent_at, time.monotonic()))
        job.come_back()

    def _put_back(self, job: Job) -> None:
        """Put `job` at the head of the queue, unless it has ended or its deadline has passed."""
        if job.reply.terminal is not None:
            return
        self._make_way(job)
        if job.deadline is None:
            self._queue.push_front(job)
        elif not self._drop_late(job, job.deadline):
            self._queue.push_front(job)
            if job.timer is None:
                self._watch_deadline(job, job.deadline)

    # --- the end ---

    async def drained(self) -> None:
        """Wait until nothing waits and nothing is in flight. No request may be submitted from now on."""
        self._draining = True
        self._check_idle()
        await self._idle.wait()

    def refuse_queue(self, error: LmiServerError) -> None:
        """Fail every request that waits in no worker."""
        while self._queue.has_next:
            self._queue.pop().fail(error)
        while self._held_back:
            self._held_back.popleft().fail(error)
        self._check_idle()

    def fail_all(self, error: LmiServerError) -> None:
        """Fail every request that waits or is in flight."""
        self.refuse_queue(error)
        for worker in self._roster.serving:
            for job in worker.requests.in_flight.values():
                job.fail(error)
                worker.requests.cancel(job)

    def stop(self) -> None:
        self._forming.stop()

    def _check_idle(self) -> None:
        if self._draining and not self._queue and not self._held_back and not self.in_flight:
            self._idle.set()
