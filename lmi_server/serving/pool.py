"""The workers of one model and the requests that they hold or that wait for them.

Every accepted job gets exactly one terminal item in its reply slot:

    submit -> waiting in the queue -> in flight on one worker -> ended
                    ^                        |
                    +---- at the head: the worker died before its handler began the job, or it was recalled;
                          or once, where requests are served side by side and nothing was sent to the client

`max_in_flight` is never exceeded: a place is free again only when the worker's terminal item for it arrived, or the
worker is dead.

Where the handler takes batches, the batch is formed here (`BatchForming`): `batch_size` waiting jobs, or as many as
there are once the first of them has waited for `max_batch_delay_s`, go to one worker that has nothing to do (or will
have at once, see `BatchProgress.ahead`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from lmi_server.contract.errors import (
    LmiServerError,
    ModelLoadError,
    ModelNotReadyError,
    WorkerDiedError,
)
from lmi_server.contract.protocol import CANCELLED, RECALLED, End, Error, GetMetrics, Head, Input, Item, Ready, Reply
from lmi_server.machine.devices import DeviceSet
from lmi_server.serving.adapters import Adapters
from lmi_server.serving.batch_forming import BatchForming
from lmi_server.serving.job_queue import JobQueue
from lmi_server.serving.pool_settings import ModelStatus, PoolSettings
from lmi_server.serving.progress_watch import ProgressWatch
from lmi_server.serving.scaling import WorkerScaling
from lmi_server.serving.sticky_sessions import StickySessions
from lmi_server.supervisor.job import Job
from lmi_server.supervisor.replicas import CrashLoopDetector, LoadPlan, ReplicaSet
from lmi_server.supervisor.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

_MAX_UNREAD = 16 << 20  # bytes of one answer that its client has not read yet
_WORKER_STOP_S = 10.0
_METRICS_TIMEOUT_S = 1.0
_UNLIMITED = 1 << 30


class WorkerPool:
    """Serves one model with the workers on its device sets. Everything runs on one event loop."""

    def __init__(self, settings: PoolSettings) -> None:
        self.name = settings.load.model_name
        self.label = self.name if settings.version is None else f"{self.name}:{settings.version}"
        self.failure: LmiServerError | None = None
        self.was_ready = False
        self.max_model_len = 0  # tokens, once a worker was ready; 0 where the model has no such bound
        self.stopping = False
        self.loading_turns = asyncio.Semaphore(_UNLIMITED if settings.parallel_loading else 1)
        self._settings = settings
        self._queue: JobQueue[Job] = JobQueue(self.name, settings.job_queue_size)
        self._ids = itertools.count(1)
        self._ready: list[WorkerProcess] = []
        self._leaving: set[WorkerProcess] = set()  # they finish their last requests
        self._workers: dict[WorkerProcess, int] = {}  # every process that is not reaped yet, and its number
        plan = LoadPlan(settings.load, settings.model_loading_timeout_s)
        self.replica_sets: Sequence[ReplicaSet] = [ReplicaSet(devices, plan, self) for devices in settings.device_sets]
        self._scaling = WorkerScaling(self.label, self.replica_sets)
        self.adapters = Adapters(settings.adapters, lambda: self._ready, settings.model_loading_timeout_s)
        self._sessions = StickySessions()
        self._crash_loop = CrashLoopDetector(settings.retry_threshold, settings.death_window_s)
        self._draining = False
        self._closing = "The server is shutting down"
        self._idle = asyncio.Event()
        self._settled = asyncio.Event()
        self._forming = BatchForming(
            self._queue, settings.job_queue_size, settings.max_batch_delay_s, self._dispatch, self._serving
        )
        self._watch = ProgressWatch(
            settings.predict_timeout_s,
            min(settings.predict_timeout_s, settings.max_idle_s),
            self._serving,
            self._end,
            self._retire_idle,
        )

    # --- state ---

    @property
    def status(self) -> ModelStatus:
        if self.failure is not None:
            return ModelStatus.FAILED
        if self._ready:
            return ModelStatus.HEALTHY
        if not self.was_ready:
            return ModelStatus.PENDING
        # The next request starts a worker of a model that is scaled to zero, unless no set may have any.
        asleep = all(replicas.min_workers == 0 for replicas in self.replica_sets)
        return ModelStatus.HEALTHY if asleep and self._max_workers else ModelStatus.UNHEALTHY

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def in_flight(self) -> int:
        return sum(len(worker.in_flight) for worker in self._serving())

    @property
    def ready_workers(self) -> int:
        return len(self._ready)

    @property
    def _max_workers(self) -> int:
        return sum(replicas.max_workers for replicas in self.replica_sets)

    def worker_gauges(self) -> dict[str, Mapping[str, float]]:
        """Return what each ready worker last told in Stats, by the worker's name."""
        return {worker.name: worker.gauges for worker in self._ready}

    async def engine_metrics(self) -> dict[str, bytes]:
        """Return what the engine of each ready worker measures of itself, by the worker's name.

        Left out is who measures nothing or does not answer within a second: a scrape waits for nobody.
        """

        async def ask(worker: WorkerProcess) -> bytes:
            try:
                async with asyncio.timeout(_METRICS_TIMEOUT_S):
                    return await worker.control(GetMetrics())
            except (LmiServerError, TimeoutError):
                return b""

        workers = list(self._ready)
        texts = await asyncio.gather(*map(ask, workers))
        return {worker.name: text for worker, text in zip(workers, texts, strict=True) if text}

    def worker_number(self, worker: WorkerProcess) -> int:
        """Return the number of a worker that is not reaped yet; no two have the same."""
        return self._workers[worker]

    def is_leaving(self, worker: WorkerProcess) -> bool:
        """Tell whether a worker only finishes what it holds."""
        return worker in self._leaving

    async def settled(self) -> ModelStatus:
        """Wait until the model is loaded, or has failed to; return the status."""
        await self._settled.wait()
        return self.status

    # --- requests ---

    def submit(self, request: Input, priority: int, on_overflow: Callable[[], None]) -> Job:
        """Accept one request; its answer arrives in `job.reply`.

        `on_overflow` is called when the client reads so slowly that the answer is given up. Raises QueueFullError and
        ModelNotReadyError; nothing was accepted then.
        """
        self._check_open()
        job = Job(next(self._ids), request, priority, on_overflow)
        self._queue.push(job)
        self._dispatch()
        return job

    def cancel(self, job: Job) -> None:
        """The client of `job` went away. Nothing happens where it has ended."""
        if job.cancelled or job.reply.terminal is not None:
            return
        job.cancelled = True
        job.quiet_since = time.monotonic()  # from now on its worker owes the place
        job.reply.put(Error(job.id, CANCELLED, "the client went away"))
        if self._queue.remove(job):
            self._check_idle()
        elif job.worker is not None:
            job.worker.cancel(job)

    def _check_open(self) -> None:
        if self._draining:
            raise ModelNotReadyError(self._closing)
        refusal = self._refusal()
        if refusal is not None:
            raise refusal

    def _refusal(self) -> ModelNotReadyError | None:
        """Return why the model takes nothing, None where it does. A restart that is loading does."""
        if self.failure is not None:
            return ModelNotReadyError(f"Model is not ready: {self.name}: {self.failure.message}")
        if not self.was_ready:
            return ModelNotReadyError(f"Model is not ready: {self.name}: it is loading")
        enabled = [replicas for replicas in self.replica_sets if replicas.max_workers]
        if not enabled:
            return ModelNotReadyError(f"All model workers has been shutdown: {self.name}")
        if all(replicas.is_failing for replicas in enabled):
            return ModelNotReadyError(f"Model is not ready: {self.name}: it could not be loaded again; see the log")
        return None

    def _worker_for(self, job: Job) -> WorkerProcess | None:
        """Return the worker that `job` goes to next: that of its session, or any where that one has no room."""
        sticky = self._sessions.worker_of(job.request)
        return sticky if sticky is not None and self._has_room(sticky) else self._roomiest()

    def _roomiest(self) -> WorkerProcess | None:
        best: WorkerProcess | None = None
        least = _UNLIMITED
        for worker in self._ready:
            if len(worker.in_flight) < least and self._has_room(worker):
                best, least = worker, len(worker.in_flight)
        return best

    def _has_room(self, worker: WorkerProcess) -> bool:
        if worker.batch_size is None:
            return len(worker.in_flight) < self._settings.max_in_flight
        return worker.takes_batch(time.monotonic())

    def _dispatch(self) -> None:
        while self._queue:
            worker = self._worker_for(self._queue.peek())
            if worker is None:
                if not (self.stopping or self._draining or self.failure is not None):
                    self._scaling.grow()
                break
            size = worker.batch_size or 1
            if not self._forming.is_due(size):
                break
            jobs = [self._queue.pop() for _ in range(min(size, len(self._queue)))]
            for job in jobs:
                self._sessions.sent(job.request, worker)
            worker.submit(jobs)
            if worker.batch_size is not None:
                self._forming.watch_delayed()
        self._check_idle()

    def _on_items(self, worker: WorkerProcess, items: list[Item]) -> None:
        in_flight = worker.in_flight
        recalled: list[Job] = []
        freed = False
        for item in items:
            job = in_flight.get(item.id)
            if job is None:
                if not worker.settle(item):
                    logger.error("[%s] sent a %s for request %d, which it does not hold", worker.name, item, item.id)
                continue
            kind = type(item)
            if kind is Reply or kind is End or kind is Error:
                worker.ended(job)
                freed = True
                if isinstance(item, Error) and item.kind == RECALLED:
                    recalled.append(job)
                    continue
            if isinstance(item, Reply | Head):
                self._sessions.answered(item.headers, worker)
            reply = job.reply
            reply.put(item)
            if reply.unread > _MAX_UNREAD:
                self._overflow(job)
        for job in reversed(recalled):
            self._requeue(job)
        if freed:
            self._dispatch()

    def _overflow(self, job: Job) -> None:
        if job.cancelled:
            return
        logger.warning(
            "request %s: its client has left %d bytes of the answer unread; cancelled, the connection is closed",
            *(job.request_id, job.reply.unread),
        )
        self.cancel(job)
        job.on_overflow()

    def _end(self, job: Job, error: LmiServerError) -> None:
        job.reply.put(Error(job.id, error.kind, error.message))

    # --- workers ---

    def start(self) -> None:
        """Spawn the workers; `settled` tells when they are loaded."""
        for replicas in self.replica_sets:
            replicas.scale(self._settings.min_workers, self._settings.max_workers)
        self._watch.start()

    async def scale(self, min_workers: int | None, max_workers: int | None, device: int | None = None) -> None:
        """Set the bounds of each device set (of the one that begins with `device`); None keeps a bound.

        Returns once `min_workers` are loaded. Raises BadParameterError where the bounds contradict each other or there
        is no such device, ModelNotReadyError where the model is not loaded, ModelLoadError where a worker cannot load
        it.
        """
        if self._draining or self.failure is not None or not self.was_ready:
            self._check_open()
        self._scaling.set_bounds(min_workers, max_workers, device)
        self._fail_stranded()
        self._scaling.notify()  # who waited for more workers than are wanted now
        await self._scaling.complete()

    def _retire_idle(self, now: float) -> None:
        for replicas in self.replica_sets:
            replicas.retire_idle(now, self._settings.max_idle_s)

    def set_log_level(self, level: str) -> None:
        for replicas in self.replica_sets:
            replicas.set_log_level(level)
        for worker in self._workers:
            worker.set_log_level(level)

    def _serving(self) -> list[WorkerProcess]:
        return [*self._ready, *self._leaving]

    def new_worker(self, devices: DeviceSet) -> WorkerProcess:
        taken = set(self._workers.values())
        number = next(number for number in itertools.count() if number not in taken)
        worker = WorkerProcess(
            f"{self.label}-{number}",
            self._on_items,
            self._on_lost,
            self._settings.heartbeat_timeout_s,
            {**self._settings.environment, **devices.environment},
            self._settings.mpi,
        )
        self._workers[worker] = number
        return worker

    async def equip(self, worker: WorkerProcess) -> None:
        await self.adapters.equip(worker)

    def admit(self, worker: WorkerProcess, ready: Ready) -> None:
        if worker.lost.is_set():
            raise ModelLoadError("the worker process ended right after it had loaded the model")
        details = " ".join(f"{key}={value}" for key, value in ready.details.items())
        logger.info(
            "[%s] ready: process %s, max_model_len=%d %s", worker.name, worker.pid, ready.max_model_len, details
        )
        self.was_ready = True
        self.max_model_len = ready.max_model_len
        self._ready.append(worker)
        self._settled.set()
        self._dispatch()
        self._scaling.notify()

    def leave(self, worker: WorkerProcess) -> None:
        if worker in self._ready:
            self._ready.remove(worker)
            self._leaving.add(worker)
            self._sessions.forget(worker)

    def forget(self, worker: WorkerProcess) -> None:
        del self._workers[worker]

    def died(self) -> None:
        if self._crash_loop.record(time.monotonic()):
            self._fail(
                ModelLoadError(
                    f"its workers died more than retry_threshold={self._settings.retry_threshold} times within "
                    f"{self._settings.death_window_s:g} seconds; see the log, then register it again"
                )
            )

    def unloadable(self, error: ModelLoadError) -> None:
        self._fail(error)

    def cannot_add(self, error: ModelLoadError) -> None:
        self._scaling.notify(error)
        self._fail_stranded()

    def _on_lost(self, worker: WorkerProcess) -> None:
        """Take back the jobs of a dead worker: retry what no client has seen a byte of, once; fail the rest."""
        if worker in self._ready:
            self._ready.remove(worker)
            self._sessions.forget(worker)
        elif worker in self._leaving:
            self._leaving.remove(worker)
        else:
            return
        jobs = list(worker.in_flight.values())
        worker.in_flight.clear()
        if jobs:
            logger.error("[%s] the worker process ended with %d requests in flight", worker.name, len(jobs))
        for job in reversed(jobs):  # each goes to the head, so the oldest last
            self._take_back(worker, job)
        self._dispatch()
        self._fail_stranded()

    def _take_back(self, worker: WorkerProcess, job: Job) -> None:
        if not worker.has_begun(job):
            self._requeue(job)
        elif job.retried or job.reply.started or worker.batch_size is not None:
            self._end(job, WorkerDiedError("The worker process ended while it held the request"))
        else:
            job.retried = True
            self._requeue(job)

    def _requeue(self, job: Job) -> None:
        if job.reply.terminal is None:
            job.worker = None
            self._queue.push_front(job)

    def _fail(self, error: ModelLoadError) -> None:
        if self.failure is not None:
            return
        what = "has failed" if self.was_ready else "could not be loaded"
        logger.error("model %s %s: %s", self.label, what, error)
        self.failure = error
        for replicas in self.replica_sets:
            replicas.close()
        self._settled.set()
        self._scaling.notify(error)
        self._fail_stranded()

    def _fail_stranded(self) -> None:
        """Fail what waits where no worker will come for it soon."""
        refusal = self._refusal()
        if refusal is not None and not self._ready:
            self._refuse_queue(refusal)

    def _refuse_queue(self, error: LmiServerError) -> None:
        while self._queue:
            self._end(self._queue.pop(), error)
        self._check_idle()

    # --- the end ---

    async def drain(self, timeout_s: float, reason: str | None = None) -> None:
        """Accept nothing more; let what was accepted finish within `timeout_s` seconds, then fail the rest.

        `reason` is what clients are told; without it, that the server shuts down.
        """
        self._draining = True
        self._closing = reason or self._closing
        self._check_idle()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("model %s: %d requests are not finished", self.name, self.queued + self.in_flight)
            self._fail_unfinished(ModelNotReadyError(self._closing))

    async def stop(self, deadline_s: float = _WORKER_STOP_S) -> None:
        """End the workers within `deadline_s` seconds; they are killed then."""
        self._draining = True
        self._fail_unfinished(ModelNotReadyError(self._closing))
        self.stopping = True
        self._scaling.notify(ModelNotReadyError(self._closing))
        self._watch.stop()
        self._forming.stop()
        serving, self._ready, self._leaving = self._serving(), [], set()
        await asyncio.gather(*(worker.shutdown(deadline_s) for worker in serving))
        await asyncio.gather(*(replicas.stop() for replicas in self.replica_sets))
        await asyncio.gather(*(worker.reap() for worker in self._workers))  # where that was cut short

    def kill(self) -> None:
        """End the workers at once, whatever they do."""
        for worker in self._workers:
            worker.kill()

    def _fail_unfinished(self, error: LmiServerError) -> None:
        self._refuse_queue(error)
        for worker in self._serving():
            for job in worker.in_flight.values():
                self._end(job, error)
                worker.cancel(job)

    def _check_idle(self) -> None:
        if self._draining and not self._queue and not self.in_flight:
            self._idle.set()
