"""The replicas of one model as a front end sees them: a connection to each that Ray says is running."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from lmi_server.contract.errors import BadParameterError, ModelLoadError
from lmi_server.contract.metrics import MetricSink
from lmi_server.contract.progress import Progress
from lmi_server.contract.texts.log_fields import WorkerLogger
from lmi_server.machine.devices import DeviceSet
from lmi_server.ray.messages import ModelReplicas
from lmi_server.serving.adapters.adapters import RegisteredAdapter
from lmi_server.serving.pool.load_reports import LoadReports, LoadStatus
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.serving.pool_settings import PoolSettings
from lmi_server.supervisor.launch.remote import RemotePlace
from lmi_server.supervisor.replicas import Backoff, LoadPlan, Owner, Replicas
from lmi_server.supervisor.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

_RETIREMENT_S = 600.0  # for the requests that a replica holds when Ray ends it; Ray's own limit is the shorter one


class _Connection:
    """The connection to one replica, and the task that makes it again if it breaks."""

    def __init__(self) -> None:
        self.worker: WorkerProcess | None = None  # None while it is not ready
        self.closing = False
        self.task: asyncio.Task[None] | None = None


class RemoteReplicas(Replicas):
    """Keeps a connection to every replica. How many there are is Ray's business: nothing here starts or ends one.

    `on_wanted` is called when a request waits and there is no replica.
    """

    def __init__(self, plan: LoadPlan, owner: Owner, on_wanted: Callable[[], None]) -> None:
        super().__init__(DeviceSet())
        self._plan = plan
        self._owner = owner
        self._on_wanted = on_wanted
        self._connections: dict[str, _Connection] = {}
        self._ending: set[_Connection] = set()

    def update(self, places: Mapping[str, RemotePlace]) -> None:
        """Connect to new replicas, and send no more requests to replicas that are missing in `places`."""
        for replica in self._connections.keys() - places.keys():
            self._leave(self._connections.pop(replica))
        for replica in places.keys() - self._connections.keys():
            connection = self._connections[replica] = _Connection()
            connection.task = asyncio.create_task(self._keep(connection, places[replica]))

    @property
    def workers(self) -> Sequence[WorkerProcess]:
        connections = [*self._connections.values(), *self._ending]
        return [connection.worker for connection in connections if connection.worker is not None]

    @property
    def ready(self) -> int:
        return len([connection for connection in self._connections.values() if connection.worker is not None])

    @property
    def size(self) -> int:
        return len(self._connections)

    def can_grow(self) -> bool:
        """Return whether there is no replica. Otherwise Ray counts the requests of each, and adds one."""
        return not self._connections

    def grow(self) -> None:
        self._on_wanted()

    def close(self) -> None:
        self.update({})

    async def stop(self) -> None:
        connections = [*self._connections.values(), *self._ending]
        tasks = [connection.task for connection in connections if connection.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _leave(self, connection: _Connection) -> None:
        connection.closing = True
        assert connection.task is not None
        if connection.worker is None:
            connection.task.cancel()
            return
        self._ending.add(connection)
        connection.task.add_done_callback(lambda _: self._ending.discard(connection))
        self._owner.leave(connection.worker)
        connection.worker.retire(_RETIREMENT_S)

    async def _keep(self, connection: _Connection, place: RemotePlace) -> None:
        """Keep a connection to one replica, until Ray does not name it any more."""
        backoff = Backoff()
        while not (connection.closing or self._owner.stopping):
            worker = self._owner.new_worker(self.devices, place)
            was_of_use = False
            try:
                ready = await worker.load(self._plan.load, self._plan.timeout_s)
                await self._owner.equip(worker)  # no await may follow before `admit`: see Adapters.equip
                self._owner.admit(worker, ready)
                connection.worker = worker
                was_of_use = True
                await worker.lost.wait()
            except ModelLoadError as error:
                WorkerLogger(logger, worker.name).warning("cannot connect to the replica: %s", error)
            finally:
                connection.worker = None
                await worker.reap()
                self._owner.forget(worker)
            if not (connection.closing or self._owner.stopping):
                await asyncio.sleep(backoff.pause_s(was_of_use))


def starting(there: int, wanted: int) -> Progress:
    """Return how many of the replicas that Ray is to keep running are there."""
    return Progress("waiting for replicas of Ray", there, max(1, wanted), unit="replicas")


class ReplicaStarts(LoadReports):
    """The replicas that are missing: Ray starts them, and the log of each says how far it is in loading the model."""

    def __init__(self, label: str, replicas: RemoteReplicas) -> None:
        super().__init__(label)
        self._replicas = replicas
        self._missing_since: float | None = None

    @property
    def current(self) -> LoadStatus | None:
        ready, wanted = self._replicas.ready, self._replicas.min_workers
        if ready >= wanted:
            self._missing_since = None
            return None
        self._missing_since = self._missing_since or time.time()
        return LoadStatus(starting(ready, wanted), self._missing_since)


class ClusterPool(WorkerPool):
    """The pool of a front end whose workers are replicas of a cluster; see `RemoteReplicas` for `on_wanted`."""

    def __init__(self, settings: PoolSettings, on_metric: MetricSink, on_wanted: Callable[[], None]) -> None:
        self._on_wanted = on_wanted
        super().__init__(settings, on_metric)
        self.loads = ReplicaStarts(self.label, self.replicas)

    def _make_replica_sets(self, plan: LoadPlan) -> Sequence[Replicas]:
        self.replicas = RemoteReplicas(plan, self.members, self._on_wanted)
        return [self.replicas]

    def follow(self, replicas: ModelReplicas) -> None:
        """Connect to the replicas that there are now."""
        bounds = replicas.min_replicas, max(1, replicas.max_replicas)
        self.scaling.bounds[self.replicas.devices.first] = bounds
        self.replicas.scale(*bounds)
        self.replicas.update(replicas.places)
        self.dispatcher.dispatch()  # requests may wait for a replica that is gone

    def added_to(self, settings: PoolSettings) -> Sequence[RegisteredAdapter]:
        """Return the adapters that calls have registered and `settings` lack."""
        given = {each.name for each in (*self.settings.adapters, *settings.adapters)}
        return [self.adapters.get(name) for name in self.adapters.names if name not in given]

    async def scale(self, min_workers: int | None, max_workers: int | None, device: int | None = None) -> None:
        raise BadParameterError(
            f"Model {self.name} is scaled by Ray; change minWorkers and maxWorkers, then run lmi-server ray deploy"
        )
