"""Which workers have a LoRA adapter loaded, judging by their requests.

Plain data: no I/O, no clock, no asyncio.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

_MAX_AHEAD = 8  # requests that a worker may hold beyond the least loaded one
_LONGEST_NAME = 256  # characters; clients choose the names that they send, and longer ones are not remembered

W = TypeVar("W", bound=Hashable)


class AdapterAffinity(Generic[W]):
    """Remembers the last `max_adapters` of each worker, as many as a worker keeps."""

    def __init__(self, max_adapters: int) -> None:
        self._max = max_adapters
        self._adapters: dict[W, OrderedDict[str, None]] = {}

    def narrow(self, adapter: str, held: Mapping[W, int]) -> Mapping[W, int]:
        """Return the workers in `held` (with how many requests each holds) that a request for `adapter` may go to.

        These have the adapter, unless they have too much to do. Otherwise they are the least loaded workers, and among
        them the ones with the fewest adapters.
        """
        if not held:
            return held
        least = min(held.values())
        near = {worker: count for worker, count in held.items() if count < least + _MAX_AHEAD}
        having = {worker: count for worker, count in near.items() if adapter in self._adapters.get(worker, ())}
        if having:
            return having
        idle = {worker: count for worker, count in held.items() if count == least}
        fewest = min(self._count(worker) for worker in idle)
        return {worker: count for worker, count in idle.items() if self._count(worker) == fewest}

    def record(self, adapter: str, worker: W) -> None:
        """Record that `worker` gets a request for `adapter`."""
        if len(adapter) > _LONGEST_NAME:
            return
        known = self._adapters.setdefault(worker, OrderedDict())
        known[adapter] = None
        known.move_to_end(adapter)
        if len(known) > self._max:
            known.popitem(last=False)

    def forget(self, worker: W) -> None:
        """Forget a worker that takes no more requests."""
        self._adapters.pop(worker, None)

    def _count(self, worker: W) -> int:
        return len(self._adapters.get(worker, ()))
