"""The workers of one model, from the start of the first to the end of the last, and whether the model can be served.

A pool is put together from parts, each of which owns one thing:

    WorkerRoster    which workers there are, and which of them serve
    Dispatcher      the requests that wait or are in flight
    ReplicaSet      the workers on one device set: starts, restarts and retires them
    WorkerScaling   how many workers there should be
    Adapters        the LoRA adapters that every worker has
    ProgressWatch   the requests that make no progress
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from lmi_server.contract.errors import LmiServerError, ModelLoadError, ModelNotReadyError, RollingBatchError
from lmi_server.contract.histogram import Histogram
from lmi_server.contract.log_fields import WorkerLogger
from lmi_server.contract.metrics import Metric, MetricSink, unrecorded
from lmi_server.contract.protocol import Input, Ready
from lmi_server.machine.devices import DeviceSet
from lmi_server.serving.adapter_store import OnDemand, hold_in_time
from lmi_server.serving.adapters import Adapters, RegisteredAdapter
from lmi_server.serving.dispatcher import Dispatcher
from lmi_server.serving.pool_settings import ModelStatus, PoolSettings
from lmi_server.serving.progress_watch import ProgressWatch
from lmi_server.serving.roster import WorkerRoster
from lmi_server.serving.scaling import WorkerScaling
from lmi_server.serving.store_listing import StoreListing
from lmi_server.serving.worker_metrics import engine_metrics, worker_gauges
from lmi_server.supervisor.job import Deadline, Job, ReplySlot
from lmi_server.supervisor.launch.remote import RemotePlace
from lmi_server.supervisor.replicas import CrashLoopDetector, LoadPlan, Replicas, ReplicaSet
from lmi_server.supervisor.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

_PARALLEL_LOADS = 16
_LOAD_TIMES = (0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1200, 2400)  # seconds
_PAUSE_S = 0.05

WORKER_STOP_S = 10.0
"""The seconds that workers have to end when they have no requests."""

SHUTTING_DOWN = "The server is shutting down"
"""What clients are told whose requests are not finished when the server ends."""


class WorkerPool:
    """Serves one model with the workers on its device sets. Everything runs on one event loop.

    `failure` says why the model is given up for good; None while it is not. `max_model_len` is in tokens, 0 before the
    model is loaded and if it has no such bound; `batch_size` is that of Ready. `on_demand` is what loads adapters that
    requests ask for, None if nothing does. `on_metric` gets what the workers print and what the pool measures. `deaths`
    counts workers that ended although nobody asked for that, `load_times` has the seconds in which workers loaded the
    model.
    """

    def __init__(self, settings: PoolSettings, on_metric: MetricSink = unrecorded) -> None:
        self.name = settings.load.model_name
        self.label = self.name if settings.version is None else f"{self.name}:{settings.version}"
        self.failure: LmiServerError | None = None
        self.was_ready = False
        self.max_model_len = 0
        self.batch_size: int | None = None
        self.on_demand: OnDemand | None = None
        self.store_listing: StoreListing | None = None
        self.stopping = False
        self.deaths = 0
        self.load_times = Histogram(_LOAD_TIMES)
        self.loading_turns = asyncio.Semaphore(_PARALLEL_LOADS if settings.parallel_loading else 1)
        self._settings = settings
        self._on_metric = on_metric
        self._settled = asyncio.Event()
        self._closing: str | None = None  # the message for new requests, from the start of the drain on
        self._crash_loop = CrashLoopDetector(settings.retry_threshold, settings.death_window_s)
        self.replica_sets = self._make_replica_sets(LoadPlan(settings.load, settings.model_loading_timeout_s))
        self._bounds = dict(settings.bounds)
        self._roster = roster = WorkerRoster(settings.reserved_numbers)
        self._scaling = WorkerScaling(self.label, self.replica_sets)
        self._dispatcher = Dispatcher(settings, roster, self._on_no_room, on_metric)
        self.adapters = Adapters(settings.adapters, lambda: roster.ready, settings.model_loading_timeout_s)
        self._watch = ProgressWatch(
            settings.predict_timeout_s,
            min(settings.predict_timeout_s, settings.max_idle_s),
            lambda: roster.serving,
            self._on_check,
        )

    def _make_replica_sets(self, plan: LoadPlan) -> Sequence[Replicas]:
        return [ReplicaSet(devices, plan, self) for devices in self._settings.device_sets]

    # --- state ---

    @property
    def status(self) -> ModelStatus:
        if self.failure is not None:
            return ModelStatus.FAILED
        if self._roster.ready or self._starts_on_demand:
            return ModelStatus.HEALTHY
        return ModelStatus.UNHEALTHY if self.was_ready else ModelStatus.PENDING

    @property
    def _starts_on_demand(self) -> bool:
        """Return whether the next request starts a worker, because none has to run and some may."""
        asleep = all(replicas.min_workers == 0 for replicas in self.replica_sets)
        return asleep and any(replicas.max_workers for replicas in self.replica_sets)

    @property
    def queued(self) -> int:
        return self._dispatcher.queued

    @property
    def in_flight(self) -> int:
        return self._dispatcher.in_flight

    @property
    def used_at(self) -> float:
        """Return when the last request came, by time.monotonic(); without any, when the pool was made."""
        return self._dispatcher.used_at

    @property
    def is_idle(self) -> bool:
        """Return whether the model can serve and has no request."""
        return self.status is ModelStatus.HEALTHY and not self.queued and not self.in_flight

    @property
    def ready_workers(self) -> int:
        return len(self._roster.ready)

    @property
    def worker_states(self) -> Mapping[str, int]:
        """Return how many workers take requests, only finish theirs, or do neither (yet, or any more)."""
        ready, leaving = len(self._roster.ready), len(self._roster.leaving)
        return {"ready": ready, "leaving": leaving, "starting": len(self._roster.everyone) - ready - leaving}

    @property
    def worker_pids(self) -> dict[str, int]:
        """Return the process of each worker on this machine, by the worker's name."""
        return {worker.name: worker.pid for worker in self._roster.everyone if worker.is_local and worker.pid}

    @property
    def batch_sizes(self) -> Histogram:
        return self._dispatcher.batch_sizes

    @property
    def retries(self) -> int:
        """Return how many requests were sent to a worker again, because another one gave them back or died."""
        return self._dispatcher.retries

    def worker_gauges(self) -> dict[str, Mapping[str, float]]:
        """Return the gauges that each ready worker last reported, by the worker's name."""
        return worker_gauges(self._roster.ready)

    async def engine_metrics(self) -> dict[str, bytes]:
        """Return the metrics of each ready worker's engine, as `worker_metrics.engine_metrics` does."""
        return await engine_metrics(list(self._roster.ready))

    def bounds_of(self, replicas: Replicas) -> tuple[int, int]:
        """Return minWorkers and maxWorkers of a device set, as they were if the model is given up."""
        if self.failure is None:
            return replicas.min_workers, replicas.max_workers
        return self._configured_bounds(replicas)

    def _configured_bounds(self, replicas: Replicas) -> tuple[int, int]:
        configured = (self._settings.min_workers, self._settings.max_workers)
        return self._bounds.get(replicas.devices.first, configured)

    def worker_number(self, worker: WorkerProcess) -> int:
        """Return the number of a worker that is not reaped yet; no two have the same."""
        return self._roster.number_of(worker)

    def is_ready(self, worker: WorkerProcess) -> bool:
        """Return whether a worker takes requests; otherwise it finishes those that it holds, or ends."""
        return worker in self._roster.ready

    async def settled(self) -> ModelStatus:
        """Wait until the model is loaded, or cannot be; return the status."""
        await self._settled.wait()
        return self.status

    async def until_ready(self) -> None:
        """Wait until a worker is ready; have one started if none has to run. Raises ModelNotReadyError."""
        while not self._roster.ready:
            self._check_open()
            self._on_no_room()
            await asyncio.sleep(_PAUSE_S)

    async def complete(self) -> None:
        """Wait until as many workers are ready as have to run, and one also if none has to.

        Raises the error with which a worker does not load the model, ModelNotReadyError if none may run.
        """
        if not any(replicas.max_workers for replicas in self.replica_sets):
            raise self._without_workers()
        await self._settled.wait()
        try:
            await self.until_ready()
        except ModelNotReadyError as error:
            raise self.failure or error from None
        await self._scaling.complete()

    async def succeed(self, settings: PoolSettings) -> PoolSettings:
        """Return the settings of a pool that takes the place of this one: with what calls have changed here.

        These are the adapters, and the numbers of workers. Adapters that requests have brought stay here.
        """
        return msgspec.structs.replace(
            settings,
            adapters=await self._as_changed(settings.adapters),
            own_adapters=settings.adapters,
            bounds=self._bounds,
            reserved_numbers=self._roster.numbers,
        )

    async def _as_changed(self, own: Sequence[RegisteredAdapter]) -> tuple[RegisteredAdapter, ...]:
        """Return the adapters of a successor: its `own`, with what calls have registered, changed and removed here."""
        settings = self._settings
        own_here = settings.adapters if settings.own_adapters is None else settings.own_adapters
        before = {each.name: each for each in own_here}
        now = {each.name: each for each in await self.adapters.all()}
        on_demand = self.on_demand
        changed = {
            name: each
            for name, each in now.items()
            if before.get(name) != each and not (on_demand is not None and on_demand.keeps(name))
        }
        removed = before.keys() - now.keys()
        kept = {each.name: each for each in own if each.name not in removed}
        return tuple({**kept, **changed}.values())

    # --- requests ---

    def submit(
        self,
        request: Input,
        on_overflow: Callable[[], None],
        deadline: Deadline | None = None,
        tenant: bytes = b"",
        reply: ReplySlot | None = None,
    ) -> Job:
        """Accept one request; its answer arrives in `job.reply`, which is `reply` if it is given.

        `on_overflow` is called if the client reads so slowly that the answer is given up. Raises QueueFullError,
        QueueDelayError, QuarantinedError and ModelNotReadyError; nothing was accepted then.
        """
        self._check_open()
        return self._dispatcher.submit(request, on_overflow, deadline, tenant, reply)

    async def submit_holding(
        self,
        on_demand: OnDemand,
        request: Input,
        on_overflow: Callable[[], None],
        deadline: Deadline | None = None,
        tenant: bytes = b"",
        reply: ReplySlot | None = None,
    ) -> Job:
        """Accept one request, as `submit` does, once its adapter is loaded; `on_demand.release` must follow.

        Raises what `submit` and `hold_in_time` raise; nothing is held then.
        """
        await hold_in_time(on_demand, request, deadline)
        try:
            return self.submit(request, on_overflow, deadline, tenant, reply)
        except LmiServerError:
            on_demand.release(request)
            raise

    def cancel(self, job: Job) -> None:
        """Free what `job` holds, because its client went away. Nothing happens if the job has ended."""
        self._dispatcher.cancel(job)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise ModelNotReadyError(self._closing)
        refusal = self._refusal()
        if refusal is not None:
            raise refusal

    def _refusal(self) -> ModelNotReadyError | None:
        """Return why the model takes no requests, None if it does. It takes some while a worker is being restarted."""
        if self.failure is not None:
            return self._not_ready(self.failure.message)
        if self._roster.ready:
            return None
        if not self.was_ready and not self._starts_on_demand:
            return self._not_ready("it is loading")
        enabled = [replicas for replicas in self.replica_sets if replicas.max_workers]
        if not enabled:
            return self._without_workers()
        if all(replicas.is_failing for replicas in enabled):
            return self._not_ready("it could not be loaded again; see the log")
        return None

    def _without_workers(self) -> ModelNotReadyError:
        return ModelNotReadyError(f"All model workers has been shutdown: {self.name}")  # LMI's words

    def _not_ready(self, reason: str) -> ModelNotReadyError:
        return ModelNotReadyError(f"Model is not ready: {self.name}: {reason}")

    def _on_no_room(self) -> None:
        if not (self.stopping or self._closing or self.failure):
            self._scaling.grow()

    # --- the number of workers ---

    def start(self) -> None:
        """Spawn the workers; `settled` returns once they are loaded, or at once if the first request starts one."""
        for replicas in self.replica_sets:
            replicas.scale(*self._configured_bounds(replicas))
        self._watch.start()
        if self._starts_on_demand:
            logger.info("model %s: minWorkers is 0, so that the first request starts a worker", self.label)
            self._settled.set()

    async def scale(self, min_workers: int | None, max_workers: int | None, device: int | None = None) -> None:
        """Set the bounds of each device set (of the one whose first device is `device`); None keeps a bound.

        Returns once `min_workers` are loaded. Raises BadParameterError if the bounds contradict each other or there is
        no such device, ModelNotReadyError if the model is not loaded, ModelLoadError if a worker cannot load it.
        """
        if self._closing or self.failure is not None or not self.was_ready:
            self._check_open()
        self._scaling.set_bounds(min_workers, max_workers, device)
        for replicas in self.replica_sets:
            if device in (None, replicas.devices.first):
                self._bounds[replicas.devices.first] = (replicas.min_workers, replicas.max_workers)
        self._fail_stranded()
        self._scaling.notify()  # callers that wait for more workers than are wanted now
        await self._scaling.complete()

    def set_log_level(self, level: str, name: str) -> None:
        for replicas in self.replica_sets:
            replicas.set_log_level(level, name)
        for worker in self._roster.everyone:
            worker.set_log_level(level, name)

    def _on_check(self, now: float) -> None:
        """Retire workers that are idle, and tell the others how many requests wait."""
        self._dispatcher.report_waiting()
        for replicas in self.replica_sets:
            replicas.retire_idle(now, self._settings.max_idle_s)

    # --- what a replica set needs of its pool (see `replicas.Owner`) ---

    def _on_printed(self, metric: Metric) -> None:
        self._on_metric(metric._replace(model=self.name))

    def new_worker(self, devices: DeviceSet, remote: RemotePlace | None = None) -> WorkerProcess:
        number = self._roster.free_number()
        worker = WorkerProcess(
            f"{self.label}-{number}",
            self._dispatcher.on_items,
            self.leave,
            self._on_lost,
            self._settings.heartbeat_timeout_s,
            {**self._settings.environment, **devices.environment},
            self._settings.mpi,
            self._on_printed,
            self._settings.python,
            remote,
        )
        self._roster.add(worker, number)
        return worker

    async def equip(self, worker: WorkerProcess) -> None:
        await self.adapters.equip(worker)

    def admit(self, worker: WorkerProcess, ready: Ready) -> None:
        if worker.is_ending:
            raise ModelLoadError("the worker process ended right after it had loaded the model")
        details = " ".join(f"{key}={value}" for key, value in ready.details.items())
        about = WorkerLogger(logger, worker.name)
        about.info("loaded: max_model_len=%d %s", ready.max_model_len, details)
        about.info("ready: process %s", worker.pid)
        self.was_ready = True
        self.load_times.observe(worker.load_s)
        self.max_model_len = ready.max_model_len
        self.batch_size = ready.batch_size
        self._roster.ready.append(worker)
        self._settled.set()
        self._dispatcher.resume()
        self._scaling.notify()

    def leave(self, worker: WorkerProcess) -> None:
        if self._roster.leave(worker):
            self._dispatcher.forget_sessions(worker)
            worker.requests.recall_ahead()

    def forget(self, worker: WorkerProcess) -> None:
        self._roster.remove(worker)

    def died(self) -> None:
        self.deaths += 1
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

    # --- failures ---

    def _on_lost(self, worker: WorkerProcess) -> None:
        if worker in self._roster.serving:
            self._roster.drop([worker])
            self._dispatcher.take_back(worker)
            self._fail_stranded()

    def _fail(self, error: ModelLoadError) -> None:
        if self.failure is not None:
            return
        what = "has failed" if self.was_ready else "could not be loaded"
        if not isinstance(error, RollingBatchError):  # it need not be the end, and the registry logs whether it is
            logger.error("model %s %s: %s", self.label, what, error)
        self.failure = error
        for replicas in self.replica_sets:
            replicas.close()
        self._settled.set()
        self._scaling.notify(error)
        self._fail_stranded()

    def _fail_stranded(self) -> None:
        """Fail what waits if no worker is going to serve it soon."""
        refusal = self._refusal()
        if refusal is not None and not self._roster.ready:
            self._dispatcher.refuse_queue(refusal)

    # --- the end ---

    async def drain(self, timeout_s: float, reason: str = SHUTTING_DOWN) -> None:
        """Accept nothing more; let what was accepted finish within `timeout_s` seconds, then fail the rest.

        Clients get `reason` as the message of the error.
        """
        self._closing = reason
        closing = ModelNotReadyError(reason)
        self._scaling.notify(closing)
        if self.on_demand is not None:
            self.on_demand.stop()
        try:
            async with asyncio.timeout(timeout_s):
                await self._dispatcher.drained()
        except TimeoutError:
            logger.warning("model %s: %d requests are not finished", self.name, self.queued + self.in_flight)
            self._dispatcher.fail_all(closing)

    async def stop(self, deadline_s: float = WORKER_STOP_S) -> None:
        """End the workers within `deadline_s` seconds, and kill those that are left then."""
        self._closing = self._closing or SHUTTING_DOWN
        closing = ModelNotReadyError(self._closing)
        self._dispatcher.fail_all(closing)
        self.stopping = True
        self._scaling.notify(closing)
        self._watch.stop()
        self._dispatcher.stop()
        if self.on_demand is not None:
            self.on_demand.stop()
        serving = self._roster.serving
        self._roster.drop(serving)
        await asyncio.gather(*(worker.shutdown(deadline_s) for worker in serving))
        await asyncio.gather(*(replicas.stop() for replicas in self.replica_sets))
        # Stopping a replica set cancels its tasks, which may cut a reap short: finish it here.
        await asyncio.gather(*(worker.reap() for worker in self._roster.everyone))

    def kill(self) -> None:
        """End the workers at once, whatever they do."""
        for worker in self._roster.everyone:
            worker.kill()
