"""The workers of one model and the requests that they hold or that wait for them.

Every accepted job gets exactly one terminal item in its reply slot:

    submit -> waiting in the queue -> in flight on one worker -> ended
                    ^                        |
                    +---- once, at the head: the worker died and nothing was sent to the client

`max_in_flight` is never exceeded: a place is free again only when the worker's terminal item for it arrived, or the
worker is dead.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from enum import Enum

import msgspec

from lmi_server.errors import LmiServerError, ModelLoadError, ModelNotReadyError, WorkerDiedError
from lmi_server.job import CANCELLED, Job
from lmi_server.job_queue import JobQueue
from lmi_server.protocol import End, Error, Input, Item, Load, Ready, Reply
from lmi_server.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

_MAX_UNREAD = 16 << 20  # bytes of one answer that its client has not read yet
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 30.0
_HEALTHY_AFTER_S = 60.0
_WORKER_STOP_S = 10.0


class ModelStatus(Enum):
    """The words are those of LMI's `/ping`."""

    PENDING = "PENDING"
    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"
    FAILED = "FAILED"


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool needs to know of a model. Times are in seconds."""

    load: Load
    workers: int = 1
    max_in_flight: int = 32
    job_queue_size: int = 1000
    model_loading_timeout_s: float = 240.0
    heartbeat_timeout_s: float = 30.0
    parallel_loading: bool = False


class Backoff:
    """The pause before a restart: doubles each time; starts over after a worker that was healthy for a minute."""

    def __init__(self) -> None:
        self._next_s = _FIRST_BACKOFF_S

    def pause_s(self, healthy_s: float) -> float:
        """Return the pause in seconds after a worker that was ready for `healthy_s` seconds."""
        if healthy_s >= _HEALTHY_AFTER_S:
            self._next_s = _FIRST_BACKOFF_S
        pause, self._next_s = self._next_s, min(2 * self._next_s, _LONGEST_BACKOFF_S)
        return pause


class WorkerPool:
    """Serves one model with `settings.workers` processes. Everything runs on one event loop."""

    def __init__(self, settings: PoolSettings) -> None:
        self.name = settings.load.model_name
        self.failure: str | None = None
        self._settings = settings
        self._queue: JobQueue[Job] = JobQueue(self.name, settings.job_queue_size)
        self._ids = itertools.count(1)
        self._ready: list[WorkerProcess] = []
        self._workers: set[WorkerProcess] = set()  # every process that is not reaped yet
        self._keepers: list[asyncio.Task[None]] = []
        self._was_ready = False
        self._draining = False
        self._stopping = False
        self._loading_turns = asyncio.Semaphore(settings.workers if settings.parallel_loading else 1)
        self._idle = asyncio.Event()
        self._settled = asyncio.Event()
        self._failed: set[int] = set()  # the replicas whose last attempt to load failed

    # --- state ---

    @property
    def status(self) -> ModelStatus:
        if self.failure is not None:
            return ModelStatus.FAILED
        if self._ready:
            return ModelStatus.HEALTHY
        return ModelStatus.UNHEALTHY if self._was_ready else ModelStatus.PENDING

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def in_flight(self) -> int:
        return sum(len(worker.in_flight) for worker in self._ready)

    @property
    def ready_workers(self) -> int:
        return len(self._ready)

    def worker_gauges(self) -> dict[str, Mapping[str, float]]:
        """Return what each ready worker last told in Stats, by the worker's name."""
        return {worker.name: worker.gauges for worker in self._ready}

    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._ready if worker.pid is not None]

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
        worker = self._roomiest()
        if worker is None:
            self._queue.push(job)
        else:
            self._assign(worker, job)
        return job

    def cancel(self, job: Job) -> None:
        """The client of `job` went away. Nothing happens where it has ended."""
        if job.cancelled or job.reply.terminal is not None:
            return
        job.cancelled = True
        job.reply.put(Error(job.id, CANCELLED, "the client went away"))
        if self._queue.remove(job):
            self._check_idle()
        elif job.worker is not None:
            job.worker.cancel(job)

    def _check_open(self) -> None:
        if self._draining:
            raise ModelNotReadyError("The server is shutting down")
        refusal = self._refusal()
        if refusal is not None:
            raise refusal

    def _refusal(self) -> ModelNotReadyError | None:
        """Return why the model takes nothing, None where it does. A restart that is loading does."""
        if self.failure is not None:
            return ModelNotReadyError(f"Model is not ready: {self.name}: {self.failure}")
        if not self._was_ready:
            return ModelNotReadyError(f"Model is not ready: {self.name}: it is loading")
        if len(self._failed) == self._settings.workers:
            return ModelNotReadyError(f"Model is not ready: {self.name}: it could not be loaded again; see the log")
        return None

    def _roomiest(self) -> WorkerProcess | None:
        best: WorkerProcess | None = None
        least = self._settings.max_in_flight
        for worker in self._ready:
            if len(worker.in_flight) < least:
                best, least = worker, len(worker.in_flight)
        return best

    def _assign(self, worker: WorkerProcess, job: Job) -> None:
        job.start(worker)
        worker.submit(job)

    def _dispatch(self) -> None:
        while self._queue and (worker := self._roomiest()) is not None:
            self._assign(worker, self._queue.pop())
        self._check_idle()

    def _on_items(self, worker: WorkerProcess, items: list[Item]) -> None:
        in_flight = worker.in_flight
        freed = False
        for item in items:
            job = in_flight.get(item.id)
            if job is None:
                logger.error("[%s] sent a %s for request %d, which it does not hold", worker.name, item, item.id)
                continue
            kind = type(item)
            if kind is Reply or kind is End or kind is Error:
                del in_flight[item.id]
                freed = True
            reply = job.reply
            reply.put(item)
            if reply.unread > _MAX_UNREAD:
                self._overflow(job)
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
        self._keepers = [asyncio.create_task(self._keep(index)) for index in range(self._settings.workers)]
        for keeper in self._keepers:
            keeper.add_done_callback(self._on_keeper_end)

    def _on_keeper_end(self, keeper: asyncio.Task[None]) -> None:
        if keeper.cancelled() or keeper.exception() is None:
            return
        cause = keeper.exception()
        logger.error("model %s: a worker is not looked after any more", self.name, exc_info=cause)
        self._fail(ModelLoadError(f"{type(cause).__name__}: {cause}"))

    async def _keep(self, index: int) -> None:
        """Keep one worker running: this is the whole life of a replica."""
        backoff = Backoff()
        while True:
            worker = self._new_worker(index)
            healthy_s = 0.0
            try:
                healthy_s = await self._run(index, worker)
            except ModelLoadError as error:
                if not self._was_ready:
                    self._fail(error)
                    return
                logger.error("[%s] could not load the model again: %s", worker.name, error)
                self._failed.add(index)
                self._fail_stranded()
            if self._stopping:
                return
            pause_s = backoff.pause_s(healthy_s)
            logger.warning("[%s] restarting it in %.1f seconds", worker.name, pause_s)
            await asyncio.sleep(pause_s)

    async def _run(self, index: int, worker: WorkerProcess) -> float:
        """Run `worker` to its end; return for how many seconds it was ready. Raises ModelLoadError."""
        try:
            async with self._loading_turns:
                ready = await worker.load(self._settings.load, self._settings.model_loading_timeout_s)
            self._failed.discard(index)
            self._admit(worker, ready)
            ready_at = time.monotonic()
            await worker.lost.wait()
            return time.monotonic() - ready_at
        finally:
            await worker.reap()
            self._workers.discard(worker)

    def _new_worker(self, index: int) -> WorkerProcess:
        worker = WorkerProcess(
            f"{self.name}-{index}",
            self._on_items,
            self._retire,
            self._settings.heartbeat_timeout_s,
        )
        self._workers.add(worker)
        return worker

    def _admit(self, worker: WorkerProcess, ready: Ready) -> None:
        if worker.lost.is_set():
            raise ModelLoadError("the worker process ended right after it had loaded the model")
        details = " ".join(f"{key}={value}" for key, value in ready.details.items())
        logger.info(
            "[%s] ready: process %s, max_model_len=%d %s", worker.name, worker.pid, ready.max_model_len, details
        )
        self._was_ready = True
        self._ready.append(worker)
        self._settled.set()
        self._dispatch()

    def _retire(self, worker: WorkerProcess) -> None:
        """Take back the jobs of a dead worker: retry what no client has seen a byte of, once; fail the rest."""
        if worker not in self._ready:
            return
        self._ready.remove(worker)
        jobs = list(worker.in_flight.values())
        worker.in_flight.clear()
        logger.error("[%s] the worker process ended with %d requests in flight", worker.name, len(jobs))
        for job in reversed(jobs):  # each goes to the head, so the oldest last
            self._take_back(job)
        self._dispatch()
        self._fail_stranded()

    def _take_back(self, job: Job) -> None:
        if job.reply.terminal is not None:
            return
        if job.retried or job.reply.started:
            self._end(job, WorkerDiedError("The worker process ended while it held the request"))
            return
        job.retried = True
        job.worker = None
        self._queue.push_front(job)

    def _fail(self, error: ModelLoadError) -> None:
        logger.error("model %s could not be loaded: %s", self.name, error)
        self.failure = error.message
        for keeper in self._keepers:
            if keeper is not asyncio.current_task():
                keeper.cancel()
        self._settled.set()
        self._fail_stranded()

    def _fail_stranded(self) -> None:
        """Fail what waits where no worker will come for it soon."""
        refusal = self._refusal()
        if refusal is None or self._ready:
            return
        while self._queue:
            self._end(self._queue.pop(), refusal)
        self._check_idle()

    # --- the end ---

    async def drain(self, timeout_s: float) -> None:
        """Accept nothing more; let what was accepted finish within `timeout_s` seconds, then fail the rest."""
        self._draining = True
        self._check_idle()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("model %s: %d requests are not finished", self.name, self.queued + self.in_flight)
            self._fail_unfinished(ModelNotReadyError("The server is shutting down"))

    async def stop(self, deadline_s: float = _WORKER_STOP_S) -> None:
        """End the workers within `deadline_s` seconds; they are killed then."""
        self._draining = True
        self._fail_unfinished(ModelNotReadyError("The server is shutting down"))
        self._stopping = True
        ready, self._ready = self._ready, []
        await asyncio.gather(*(worker.shutdown(deadline_s) for worker in ready))
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(worker.reap() for worker in self._workers))  # where that was cut short

    def kill(self) -> None:
        """End the workers at once, whatever they do."""
        for worker in self._workers:
            worker.kill()

    def _fail_unfinished(self, error: LmiServerError) -> None:
        while self._queue:
            self._end(self._queue.pop(), error)
        for worker in self._ready:
            for job in worker.in_flight.values():
                self._end(job, error)
                worker.cancel(job)

    def _check_idle(self) -> None:
        if self._draining and not self._queue and not self.in_flight:
            self._idle.set()
