"""The workers of one model, from the start of the first to the end of the last.

A pool is put together from parts that own one thing each:

    WorkerRoster    which workers there are, and which of them serve
    Membership      takes workers in and lets them go, and gives the model up if they keep dying
    Availability    whether the model can be served, and why not
    Dispatcher      the requests that wait or are in flight
    ReplicaSet      the workers on one device set: starts, restarts and retires them
    WorkerScaling   how many workers there should be
    Adapters        the LoRA adapters that every worker has
    ProgressWatch   the requests that make no progress
    LoadReports     how far workers are that load the model
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from lmi_server.contract.errors import LmiServerError, ModelNotReadyError
from lmi_server.contract.metrics import MetricSink, drop_metric
from lmi_server.contract.protocol import Input
from lmi_server.serving.adapters.adapter_store import OnDemand, hold_in_time
from lmi_server.serving.adapters.adapters import Adapters
from lmi_server.serving.adapters.store_listing import StoreListing
from lmi_server.serving.dispatch.dispatcher import Dispatcher
from lmi_server.serving.pool.availability import Availability, Gate
from lmi_server.serving.pool.load_reports import LoadReports, WorkerLoads
from lmi_server.serving.pool.membership import Membership
from lmi_server.serving.pool.progress_watch import ProgressWatch
from lmi_server.serving.pool.scaling import WorkerScaling
from lmi_server.serving.pool_settings import PoolSettings
from lmi_server.serving.roster import WorkerRoster
from lmi_server.supervisor.job import Deadline, Job, ReplySlot
from lmi_server.supervisor.replicas import LoadPlan, Replicas, ReplicaSet

logger = logging.getLogger(__name__)

_PAUSE_S = 0.05

WORKER_STOP_S = 10.0
"""The seconds that workers have to end when they have no requests."""

SHUTTING_DOWN = "The server is shutting down"
"""What clients are told whose requests are not finished when the server ends."""


class WorkerPool:
    """Serves one model with the workers on its device sets. Everything runs on one event loop.

    `on_demand` loads the adapters that requests ask for; None without such. Requests wait at the `gate` before
    they are submitted; None while nothing holds them back. `on_metric` gets the workers' metrics and the pool's
    measurements. Without `adapters` those of `settings` are given to the workers.
    """

    def __init__(
        self, settings: PoolSettings, on_metric: MetricSink = drop_metric, adapters: Adapters | None = None
    ) -> None:
        self.name = settings.load.model_name
        self.label = self.name if settings.version is None else f"{self.name}:{settings.version}"
        self.settings = settings
        self.on_demand: OnDemand | None = None
        self.gate: Gate | None = None
        self.store_listing: StoreListing | None = None
        self.replica_sets: list[Replicas] = []
        self.roster = roster = WorkerRoster(settings.reserved_numbers)
        self.availability = Availability(self.name, roster, self.replica_sets)
        self.scaling = WorkerScaling(self.label, self.replica_sets, settings)
        self.adapters = adapters or Adapters(settings.adapters, lambda: roster.ready, settings.model_loading_timeout_s)
        self.dispatcher = Dispatcher(settings, roster, self._on_no_room, on_metric, self.adapters)
        self.members = Membership(
            settings,
            self.label,
            self.replica_sets,
            roster,
            self.availability,
            self.scaling,
            self.dispatcher,
            self.adapters,
            on_metric,
        )
        self.replica_sets += self._make_replica_sets(LoadPlan(settings.load, settings.model_loading_timeout_s))
        self.loads: LoadReports = WorkerLoads(self.label, roster)
        shortest_s = min(settings.predict_timeout_s, settings.max_idle_s)
        self._watch = ProgressWatch(settings.predict_timeout_s, shortest_s, lambda: roster.serving, self._on_check)

    def _make_replica_sets(self, plan: LoadPlan) -> Sequence[Replicas]:
        return [ReplicaSet(devices, plan, self.members) for devices in self.settings.device_sets]

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
        self.availability.check()
        return self.dispatcher.submit(self._prepare(request, tenant), on_overflow, deadline, tenant, reply)

    def _prepare(self, request: Input, tenant: bytes) -> Input:
        """Return a request as it goes on; a subclass may change it, or raise LmiServerError."""
        return request

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

    def _on_no_room(self) -> None:
        state = self.availability
        if not (self.members.stopping or state.closing or state.failure):
            self.scaling.grow()

    # --- the number of workers ---

    def start(self) -> None:
        """Spawn the workers. `settled` is set once they are loaded, or at once if the first request starts one."""
        self.scaling.start()
        self._watch.start()
        if self.availability.starts_on_demand:
            logger.info("model %s: minWorkers is 0, so that the first request starts a worker", self.label)
            self.availability.settled.set()

    async def until_ready(self) -> None:
        """Wait until a worker is ready; have one started if none has to run. Raises ModelNotReadyError."""
        while not self.roster.ready:
            self.availability.check()
            self._on_no_room()
            await asyncio.sleep(_PAUSE_S)

    async def complete(self) -> None:
        """Wait until as many workers are ready as have to run, and one also if none has to.

        Raises the error with which a worker does not load the model, ModelNotReadyError if none may run.
        """
        state = self.availability
        if state.failure is not None:  # then none may run any more
            raise state.failure
        if not state.may_have_workers:
            raise state.without_workers()
        await state.settled.wait()
        try:
            await self.until_ready()
        except ModelNotReadyError as error:
            raise state.failure or error from None
        await self.scaling.complete()

    async def scale(self, min_workers: int | None, max_workers: int | None, device: int | None = None) -> None:
        """Set the bounds of each device set (of the one whose first device is `device`); None keeps a bound.

        Returns once `min_workers` are loaded. Raises BadParameterError if the bounds contradict each other or there is
        no such device, ModelNotReadyError if the model is not loaded, ModelLoadError if a worker cannot load it.
        """
        state = self.availability
        if state.closing or state.failure is not None or not state.was_ready:
            state.check()
        self.scaling.set_bounds(min_workers, max_workers, device)
        self.members.fail_stranded()
        self.scaling.notify()  # callers that wait for more workers than are wanted now
        await self.scaling.complete()

    def set_log_level(self, level: str, name: str) -> None:
        for replicas in self.replica_sets:
            replicas.set_log_level(level, name)
        for worker in self.roster.everyone:
            worker.set_log_level(level, name)

    def _on_check(self, now: float) -> None:
        """Retire workers that are idle, tell the others how many requests wait, and log how far loads are."""
        self.dispatcher.lending.report_waiting()
        for replicas in self.replica_sets:
            replicas.retire_idle(now, self.settings.max_idle_s)
        if self.availability.settled.is_set():  # before, the loader shows it
            self.loads.check()

    # --- the end ---

    async def drain(self, timeout_s: float, reason: str = SHUTTING_DOWN) -> None:
        """Accept nothing more; let what was accepted finish within `timeout_s` seconds, then fail the rest.

        Clients get `reason` as the message of the error.
        """
        closing = self._close(reason)
        try:
            async with asyncio.timeout(timeout_s):
                await self.dispatcher.until_idle()
        except TimeoutError:
            unfinished = self.dispatcher.queued + self.dispatcher.in_flight
            logger.warning("model %s: %d requests are not finished", self.name, unfinished)
            self.dispatcher.fail_all(closing)

    async def stop(self, deadline_s: float = WORKER_STOP_S) -> None:
        """End the workers within `deadline_s` seconds, and kill what is left then."""
        self.dispatcher.fail_all(self._close(self.availability.closing or SHUTTING_DOWN))
        self.members.stopping = True
        self._watch.stop()
        serving = self.roster.serving
        for worker in serving:
            self.roster.drop(worker)
        await asyncio.gather(*(worker.shutdown(deadline_s) for worker in serving))
        await asyncio.gather(*(replicas.stop() for replicas in self.replica_sets))
        # Stopping a replica set cancels its tasks, which may cut a reap short: finish it here.
        await asyncio.gather(*(worker.reap() for worker in self.roster.everyone))
        if self.settings.engine_environment is not None:
            self.settings.engine_environment.lease.close()

    def _close(self, reason: str) -> ModelNotReadyError:
        """Accept nothing more; return the error for what waits."""
        self.availability.closing = reason
        closing = ModelNotReadyError(reason)
        self.scaling.notify(closing)
        if self.on_demand is not None:
            self.on_demand.stop()
        return closing
