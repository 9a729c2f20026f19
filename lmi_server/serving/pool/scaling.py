"""How many workers a model has: the bounds on each device set, more under load, and the callers that wait for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from lmi_server.contract.errors import BadParameterError, LmiServerError
from lmi_server.serving.pool_settings import PoolSettings
from lmi_server.supervisor.replicas import Replicas

logger = logging.getLogger(__name__)


class WorkerScaling:
    """Scales the replica sets of one model. `bounds` has what calls have set, by the first device of a set."""

    def __init__(self, name: str, replica_sets: Sequence[Replicas], settings: PoolSettings) -> None:
        self.bounds = dict(settings.bounds)
        self._configured = (settings.min_workers, settings.max_workers)
        self._name = name
        self._replica_sets = replica_sets
        self._waiting: list[asyncio.Future[None]] = []

    def start(self) -> None:
        """Start the workers that have to run."""
        for replicas in self._replica_sets:
            replicas.scale(*self.bounds_of(replicas))

    def bounds_of(self, replicas: Replicas) -> tuple[int, int]:
        """Return minWorkers and maxWorkers of a device set; they stay the same if the model is given up."""
        return self.bounds.get(replicas.devices.first, self._configured)

    def set_bounds(self, min_workers: int | None, max_workers: int | None, device: int | None = None) -> None:
        """Set the bounds of each replica set (of the one whose first device is `device`); None keeps a bound.

        Raises BadParameterError if the bounds contradict each other or there is no such device.
        """
        chosen = [replicas for replicas in self._replica_sets if device in (None, replicas.devices.first)]
        if not chosen:
            raise BadParameterError(f"Parameter device is {device}; model {self._name} is not loaded there")
        bounds = [_bounds(replicas, min_workers, max_workers) for replicas in chosen]
        for replicas, (min_count, max_count) in zip(chosen, bounds, strict=True):
            replicas.scale(min_count, max_count)
            self.bounds[replicas.devices.first] = (min_count, max_count)

    async def complete(self) -> None:
        """Wait until every replica set has its smallest number of workers. Raises the error that `notify` gets."""
        if self._is_complete():
            return
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        try:
            await done
        finally:
            self._waiting.remove(done)

    def _is_complete(self) -> bool:
        return all(replicas.ready >= replicas.min_workers for replicas in self._replica_sets)

    def notify(self, error: LmiServerError | None = None) -> None:
        """Wake the callers of `complete` whose workers are there now; with an `error`, all of them raise it."""
        for waiter in self._waiting:
            if waiter.done():
                continue
            if error is not None:
                waiter.set_exception(error)
            elif self._is_complete():
                waiter.set_result(None)

    def grow(self) -> None:
        """Start one more worker if a replica set may have one, because requests wait and no worker has room."""
        growing = [replicas for replicas in self._replica_sets if replicas.can_grow()]
        if growing:
            smallest = min(growing, key=lambda replicas: replicas.size)
            logger.info("model %s: requests wait; starting another worker", self._name)
            smallest.grow()


def _bounds(replicas: Replicas, min_workers: int | None, max_workers: int | None) -> tuple[int, int]:
    """Return the new bounds of `replicas`. A bound that is not given moves only as far as the other one demands."""
    min_count = replicas.min_workers if min_workers is None else min_workers
    max_count = replicas.max_workers if max_workers is None else max_workers
    if min_workers is not None and max_workers is not None and min_count > max_count:
        raise BadParameterError(
            f"Parameter min_worker is {min_count}, max_worker {max_count}; min_worker may not be above it"
        )
    if max_workers is None:
        max_count = max(min_count, max_count)
    return min(min_count, max_count), max_count
