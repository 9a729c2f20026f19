"""The workers of one model on one device set: started, restarted, added under load and retired when idle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.protocol import Load, Ready
from lmi_server.contract.texts.log_fields import WorkerLogger
from lmi_server.machine.devices import DeviceSet
from lmi_server.supervisor.launch.remote import RemotePlace
from lmi_server.supervisor.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 30.0
_HEALTHY_AFTER_S = 60.0
_RETIREMENT_S = 600.0  # for the requests that a worker holds when its model is scaled down


class Backoff:
    """The pause before a restart: doubles each time; starts over after a worker that was of use."""

    def __init__(self) -> None:
        self._next_s = _FIRST_BACKOFF_S

    def pause_s(self, was_of_use: bool) -> float:
        """Return the pause in seconds after a worker has ended."""
        if was_of_use:
            self._next_s = _FIRST_BACKOFF_S
        pause, self._next_s = self._next_s, min(2 * self._next_s, _LONGEST_BACKOFF_S)
        return pause


class CrashLoopDetector:
    """Detects that workers died more than `threshold` times within `window_s` seconds."""

    def __init__(self, threshold: int, window_s: float) -> None:
        self._threshold = threshold
        self._window_s = window_s
        self._times: deque[float] = deque()

    def record(self, now: float) -> bool:
        """Count a death at `now` (seconds of any monotonic clock); return whether there were too many."""
        self._times.append(now)
        while self._times[0] <= now - self._window_s:
            self._times.popleft()
        return len(self._times) > self._threshold


class Replicas:
    """Workers that are kept running. It starts and ends none, as where something else decides how many there are.

    `ReplicaSet` is the one whose processes this server starts itself.
    """

    def __init__(self, devices: DeviceSet) -> None:
        self.devices = devices
        self.min_workers = 0
        self.max_workers = 0

    @property
    def workers(self) -> Sequence[WorkerProcess]:
        """Return the loaded workers, including ones that only finish their last requests."""
        raise NotImplementedError

    @property
    def ready(self) -> int:
        """Return the number of workers that take requests."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """Return the number of workers that stay, loaded or not."""
        return self.ready

    @property
    def is_failing(self) -> bool:
        """Return whether no worker is going to be ready soon."""
        return False

    def scale(self, min_workers: int, max_workers: int) -> None:
        """Set the bounds."""
        self.min_workers, self.max_workers = min_workers, max_workers

    def set_log_level(self, level: str, name: str) -> None:
        """Set the level of the logger `name` ("": of all) in workers that start from now on."""

    def can_grow(self) -> bool:
        """Return whether another worker may be started now."""
        return False

    def grow(self) -> None:
        """Start one more worker."""

    def retire_idle(self, now: float, max_idle_s: float) -> None:
        """Retire workers beyond `min_workers` that had no request for `max_idle_s` seconds."""

    def close(self) -> None:
        """Retire every worker; each finishes what it holds."""

    async def stop(self) -> None:
        """End what keeps the workers running."""


class Owner(Protocol):
    """What a replica set needs of its pool."""

    loading_turns: asyncio.Semaphore
    stopping: bool

    @property
    def was_ready(self) -> bool:
        """Return whether a worker has loaded the model before."""

    def new_worker(self, devices: DeviceSet, remote: RemotePlace | None = None) -> WorkerProcess:
        """Return a worker that is not spawned yet; one at a `remote` place is not connected to yet."""

    async def equip(self, worker: WorkerProcess) -> None:
        """Give the adapters to a worker that has loaded the model. Raises ModelLoadError."""

    def admit(self, worker: WorkerProcess, ready: Ready) -> None:
        """Take a loaded worker into service. Raises ModelLoadError if it is dead already."""

    def leave(self, worker: WorkerProcess) -> None:
        """Give the worker no more requests."""

    def forget(self, worker: WorkerProcess) -> None:
        """Drop a worker whose process is gone."""

    def count_death(self) -> None:
        """Count the unexpected end of a worker."""

    def cannot_add(self, error: ModelLoadError) -> None:
        """Fail the callers that wait for more workers: one could not load the model."""

    def unloadable(self, error: ModelLoadError) -> None:
        """Give up the model, because its first worker could not load it."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What every worker of a model loads, and in how many seconds."""

    load: Load
    timeout_s: float


class _Replica:
    """One place for a worker, and the task that keeps a process running in it.

    A replica outlives its processes: when one dies, the task starts the next.
    """

    def __init__(self) -> None:
        self.worker: WorkerProcess | None = None  # None while it loads, or waits to be restarted
        self.closing = False
        self.failed = False  # its last attempt to load
        self.task: asyncio.Task[None] | None = None


class ReplicaSet(Replicas):
    """Keeps at least `min_workers` workers running on `devices`, and adds more on demand, up to `max_workers`."""

    def __init__(self, devices: DeviceSet, plan: LoadPlan, owner: Owner) -> None:
        super().__init__(devices)
        self._plan = plan
        self._owner = owner
        self._replicas: list[_Replica] = []
        self._growth = Backoff()
        self._no_growth_before = 0.0  # time.monotonic()

    @property
    def workers(self) -> list[WorkerProcess]:
        return [replica.worker for replica in self._replicas if replica.worker is not None]

    @property
    def ready(self) -> int:
        return len([replica for replica in self._replicas if replica.worker is not None and not replica.closing])

    @property
    def size(self) -> int:
        return len(self._staying())

    @property
    def is_failing(self) -> bool:
        """Return whether no worker is going to be ready soon: the last attempt of each replica to load failed."""
        staying = self._staying()
        if not staying:
            return time.monotonic() < self._no_growth_before
        return all(replica.failed for replica in staying)

    def scale(self, min_workers: int, max_workers: int) -> None:
        """Set the bounds; start missing workers and retire surplus ones."""
        super().scale(min_workers, max_workers)
        while self.size < min_workers:
            self.grow()
        for replica in self._least_loaded()[: max(0, self.size - max_workers)]:
            self._close(replica)

    def set_log_level(self, level: str, name: str) -> None:
        load = self._plan.load
        changed = {"log_levels": {**load.log_levels, name: level}} if name else {"log_level": level}
        self._plan = replace(self._plan, load=msgspec.structs.replace(load, **changed))

    def can_grow(self) -> bool:
        """Return whether another worker may be started now: one at a time, and not right after one failed to load."""
        staying = self._staying()
        loading = any(replica.worker is None for replica in staying)
        return len(staying) < self.max_workers and not loading and time.monotonic() >= self._no_growth_before

    def retire_idle(self, now: float, max_idle_s: float) -> None:
        for replica in self._least_loaded():
            if self.size <= self.min_workers:
                return
            worker = replica.worker
            if worker is None or worker.requests.in_flight:
                continue
            if now - worker.requests.progressed_at >= max_idle_s:
                WorkerLogger(logger, worker.name).info("idle for %g seconds; ending it", max_idle_s)
                self._close(replica)

    def close(self) -> None:
        self.min_workers = self.max_workers = 0
        for replica in self._staying():
            self._close(replica)

    async def stop(self) -> None:
        """Cancel every replica's task and wait for the end of all."""
        tasks = [replica.task for replica in self._replicas if replica.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _staying(self) -> list[_Replica]:
        return [replica for replica in self._replicas if not replica.closing]

    def _least_loaded(self) -> list[_Replica]:
        """Return the replicas that stay, the most dispensable first: not loaded, then with the fewest requests."""
        youngest_first = self._staying()[::-1]
        return sorted(
            youngest_first, key=lambda replica: -1 if replica.worker is None else len(replica.worker.requests.in_flight)
        )

    def grow(self) -> None:
        replica = _Replica()
        self._replicas.append(replica)
        replica.task = asyncio.create_task(self._keep(replica))
        replica.task.add_done_callback(lambda task: self._on_end(replica, task))

    def _on_end(self, replica: _Replica, task: asyncio.Task[None]) -> None:
        self._replicas.remove(replica)
        cause = None if task.cancelled() else task.exception()
        if cause is not None:
            logger.error("model %s: a worker is no longer supervised", self._plan.load.model_name, exc_info=cause)
            self._owner.unloadable(ModelLoadError(f"{type(cause).__name__}: {cause}"))

    def _close(self, replica: _Replica) -> None:
        assert replica.task is not None
        replica.closing = True
        if replica.worker is None:
            replica.task.cancel()
            return
        self._owner.leave(replica.worker)
        replica.worker.retire(_RETIREMENT_S)

    async def _keep(self, replica: _Replica) -> None:
        """Keep one worker running, until the replica is closed or given up: this is the whole life of a replica."""
        backoff = Backoff()
        while True:
            was_of_use = False
            worker = self._owner.new_worker(self.devices)
            try:
                was_of_use = await self._run(worker, replica)
                error = None
            except ModelLoadError as failed:
                replica.failed = True
                error = failed
            if replica.closing or self._owner.stopping or self._give_up(worker, error):
                return
            pause_s = backoff.pause_s(was_of_use)
            WorkerLogger(logger, worker.name).warning("restarting it in %.1f seconds", pause_s)
            await asyncio.sleep(pause_s)

    def _give_up(self, worker: WorkerProcess, error: ModelLoadError | None) -> bool:
        """Report how `worker` ended; return True if no other worker takes its place.

        A load that fails before any worker was ready is final: the model itself is wrong. Afterwards the model is known
        to be right and the cause may pass, so that the replica tries again, or goes if others serve on without it.
        """
        if error is not None and not self._owner.was_ready:
            self._owner.unloadable(error)
            return True
        if error is not None:
            WorkerLogger(logger, worker.name).error("could not load the model again: %s", error)
            self._owner.cannot_add(error)
        if error is not None and self.size > self.min_workers:
            self._no_growth_before = time.monotonic() + self._growth.pause_s(was_of_use=False)
            return True
        self._owner.count_death()
        return False

    async def _run(self, worker: WorkerProcess, replica: _Replica) -> bool:
        """Run `worker` to its end; return whether it answered a request, or was ready for a minute.

        Raises ModelLoadError.
        """
        try:
            async with self._owner.loading_turns:
                ready = await worker.load(self._plan.load, self._plan.timeout_s)
                await self._owner.equip(worker)  # no await may follow before `admit`: see Adapters.equip
            replica.failed = False
            replica.worker = worker
            self._owner.admit(worker, ready)
            ready_at = time.monotonic()
            await worker.lost.wait()
            # A request that ends its worker now and then must not have the others wait longer each time.
            return worker.requests.has_answered or time.monotonic() - ready_at >= _HEALTHY_AFTER_S
        finally:
            replica.worker = None
            await worker.reap()
            self._owner.forget(worker)
