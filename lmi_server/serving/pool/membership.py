"""The workers of a pool that come and go: admitted once they have loaded the model, and counted if they die."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from lmi_server.contract.errors import ModelLoadError, RollingBatchError
from lmi_server.contract.histogram import Histogram
from lmi_server.contract.metrics import MetricSink
from lmi_server.contract.protocol import Ready
from lmi_server.contract.texts.log_fields import WorkerLogger
from lmi_server.machine.devices import DeviceSet
from lmi_server.serving.adapters.adapters import Adapters
from lmi_server.serving.dispatch.dispatcher import Dispatcher
from lmi_server.serving.pool.availability import Availability
from lmi_server.serving.pool.scaling import WorkerScaling
from lmi_server.serving.pool_settings import PoolSettings
from lmi_server.serving.roster import WorkerRoster
from lmi_server.supervisor.launch.remote import RemotePlace
from lmi_server.supervisor.replicas import CrashLoopDetector, Replicas
from lmi_server.supervisor.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

_PARALLEL_LOADS = 16
_LOAD_TIMES = (0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1200, 2400)  # seconds


class Membership:
    """The demands of a replica set on its pool (see `replicas.Owner`, which describes the methods).

    `max_model_len` is in tokens, 0 before the model is loaded and if it has no such bound; `batch_size` is that of
    Ready. `deaths` counts workers that ended unasked; `load_times` are the seconds of the workers' loads.
    """

    def __init__(
        self,
        settings: PoolSettings,
        label: str,
        replica_sets: Sequence[Replicas],
        roster: WorkerRoster,
        availability: Availability,
        scaling: WorkerScaling,
        dispatcher: Dispatcher,
        adapters: Adapters,
        on_metric: MetricSink,
    ) -> None:
        """`replica_sets` are its own; they come after it."""
        self.max_model_len = 0
        self.batch_size: int | None = None
        self.stopping = False
        self.deaths = 0
        self.load_times = Histogram(_LOAD_TIMES)
        self.loading_turns = asyncio.Semaphore(_PARALLEL_LOADS if settings.parallel_loading else 1)
        self.equip = adapters.equip
        self._settings = settings
        self._name = settings.load.model_name
        self._label = label
        self._replica_sets = replica_sets
        self._roster = roster
        self._availability = availability
        self._scaling = scaling
        self._dispatcher = dispatcher
        self._on_metric = on_metric
        self._crash_loop = CrashLoopDetector(settings.retry_threshold, settings.death_window_s)

    @property
    def was_ready(self) -> bool:
        return self._availability.was_ready

    def new_worker(self, devices: DeviceSet, remote: RemotePlace | None = None) -> WorkerProcess:
        number, settings = self._roster.free_number(), self._settings
        worker = WorkerProcess(
            f"{self._label}-{number}",
            self._dispatcher.on_items,
            self.leave,
            self._on_lost,
            settings.heartbeat_timeout_s,
            {**settings.environment, **devices.environment},
            settings.mpi,
            lambda metric: self._on_metric(metric._replace(model=self._name)),
            settings.python,
            remote,
            settings.socket_directory,
        )
        self._roster.numbers[worker] = number
        return worker

    def admit(self, worker: WorkerProcess, ready: Ready) -> None:
        if worker.is_ending:
            raise ModelLoadError("the worker process ended right after it had loaded the model")
        details = " ".join(f"{key}={value}" for key, value in ready.details.items())
        about = WorkerLogger(logger, worker.name)
        about.info("loaded: max_model_len=%d %s", ready.max_model_len, details)
        about.info("ready: process %s", worker.pid)
        self.load_times.observe(worker.load_s)
        self.max_model_len = ready.max_model_len
        self.batch_size = ready.batch_size
        self._roster.ready.append(worker)
        self._availability.was_ready = True
        self._availability.settled.set()
        self._dispatcher.resume()
        self._scaling.notify()

    def leave(self, worker: WorkerProcess) -> None:
        if self._roster.leave(worker):
            self._dispatcher.router.forget(worker)
            worker.requests.recall_ahead()

    def _on_lost(self, worker: WorkerProcess) -> None:
        if worker in self._roster.serving:
            self._roster.drop(worker)
            self._dispatcher.take_back(worker)
            self.fail_stranded()

    def forget(self, worker: WorkerProcess) -> None:
        self._roster.remove(worker)

    def count_death(self) -> None:
        self.deaths += 1
        if self._crash_loop.record(time.monotonic()):
            self.unloadable(
                ModelLoadError(
                    f"its workers died more than retry_threshold={self._settings.retry_threshold} times within "
                    f"{self._settings.death_window_s:g} seconds; see the log, then register it again"
                )
            )

    def unloadable(self, error: ModelLoadError) -> None:
        state = self._availability
        if state.failure is not None:
            return
        what = "has failed" if state.was_ready else "could not be loaded"
        if not isinstance(error, RollingBatchError):  # it need not be the end, and the registry logs whether it is
            logger.error("model %s %s: %s", self._label, what, error)
        state.failure = error
        for replicas in self._replica_sets:
            replicas.close()
        state.settled.set()
        self.cannot_add(error)

    def cannot_add(self, error: ModelLoadError) -> None:
        self._scaling.notify(error)
        self.fail_stranded()

    def fail_stranded(self) -> None:
        """Fail what waits if no worker is going to serve it soon."""
        refusal = self._availability.refusal()
        if refusal is not None and not self._roster.ready:
            self._dispatcher.refuse_queue(refusal)
