"""How many workers a model has: the bounds of its groups, more under load, and who waits for them to be there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from lmi_server.contract.errors import BadParameterError, LmiServerError
from lmi_server.supervisor.replicas import WorkerGroup

logger = logging.getLogger(__name__)


class WorkerScaling:
    """Scales the groups of one model."""

    def __init__(self, name: str, groups: Sequence[WorkerGroup]) -> None:
        self._name = name
        self._groups = groups
        self._waiting: list[asyncio.Future[None]] = []

    def set_bounds(self, min_workers: int | None, max_workers: int | None, device: int | None = None) -> None:
        """Set the bounds of each group (of the one that begins with `device`); None keeps one.

        Raises BadParameterError where the bounds contradict each other or there is no such device.
        """
        groups = [group for group in self._groups if device is None or group.device.first == device]
        if not groups:
            raise BadParameterError(f"Parameter device is {device}; model {self._name} is not loaded there")
        bounds = [_bounds(group, min_workers, max_workers) for group in groups]
        for group, (least, most) in zip(groups, bounds, strict=True):
            group.scale(least, most)

    async def complete(self) -> None:
        """Wait until every group has its least number of workers. Raises what `tell` is given."""
        if self._is_complete():
            return
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        try:
            await done
        finally:
            self._waiting.remove(done)

    def _is_complete(self) -> bool:
        return all(group.ready >= group.min_workers for group in self._groups)

    def tell(self, error: LmiServerError | None = None) -> None:
        """Tell who waits that something has changed, or that it will not come to what they wait for."""
        for waiter in self._waiting:
            if waiter.done():
                continue
            if error is not None:
                waiter.set_exception(error)
            elif self._is_complete():
                waiter.set_result(None)

    def grow(self) -> None:
        """Start one more worker where a group may have one: requests wait, and nobody has room."""
        growing = [group for group in self._groups if group.can_grow()]
        if growing:
            smallest = min(growing, key=lambda group: group.size)
            logger.info("model %s: requests wait; starting another worker", self._name)
            smallest.grow()


def _bounds(group: WorkerGroup, min_workers: int | None, max_workers: int | None) -> tuple[int, int]:
    """Return the new bounds of `group`; a bound that is not given follows the other where it must."""
    least = group.min_workers if min_workers is None else min_workers
    most = group.max_workers if max_workers is None else max_workers
    if min_workers is not None and max_workers is not None and least > most:
        raise BadParameterError(f"Parameter min_worker is {least}, max_worker {most}; min_worker may not be above it")
    if max_workers is None:
        most = max(least, most)
    return min(least, most), most
