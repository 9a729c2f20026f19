"""Which worker has computed the beginning of a request already: its prefix cache need not be filled again.

The front end does not parse bodies, so prefixes are compared as bytes: clients write the fields of a conversation in
the same order each time. A wrong guess costs time and nothing else. Plain data: no I/O, no clock, no asyncio.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

_BLOCK = 256  # bytes
_MAX_BLOCKS = 64  # of a body: what is behind 16 KiB does not count
_REMEMBERED = 200_000  # blocks of 130 bytes; the least recently used are forgotten first
_REMEMBERED_PER_WORKER = 1_000  # if that is more: many workers serve many conversations at a time
_MIN_SHARE = 0.5  # of a body that must be known: many bodies begin alike, and differ in what is long
_MAX_AHEAD = 8  # requests that a worker may hold beyond the least loaded one

W = TypeVar("W", bound=Hashable)


class PrefixAffinity(Generic[W]):
    """Remembers the worker of each prefix."""

    def __init__(self) -> None:
        self._workers: OrderedDict[int, W] = OrderedDict()
        self._blocks: Counter[W] = Counter()

    def choose(self, body: bytes, held: Mapping[W, int]) -> W | None:
        """Return the worker for a request, of those in `held` (with how many requests each holds); None without any.

        It is the worker with the longest known beginning of `body`, unless this is short or the worker has too much to
        do. Otherwise it is the least loaded worker, or among several the one with the fewest prefixes.
        """
        if not held:
            return None
        least = min(held.values())
        blocks = list(_blocks(body))
        for known in range(len(blocks), 0, -1):
            if known < _MIN_SHARE * len(blocks):
                break
            worker = self._workers.get(blocks[known - 1])
            if worker is not None and held.get(worker, least + _MAX_AHEAD) < least + _MAX_AHEAD:
                return worker
        return min((worker for worker, count in held.items() if count == least), key=self._blocks.__getitem__)

    def record(self, body: bytes, worker: W) -> None:
        """Record that `worker` gets a request with this body."""
        for block in _blocks(body):
            self._count_lost(self._workers.pop(block, None))
            self._workers[block] = worker
            self._blocks[worker] += 1
        most = max(_REMEMBERED, _REMEMBERED_PER_WORKER * len(self._blocks))
        while len(self._workers) > most:
            self._count_lost(self._workers.popitem(last=False)[1])

    def _count_lost(self, worker: W | None) -> None:
        if worker is not None and worker in self._blocks:
            self._blocks[worker] -= 1

    def forget(self, worker: W) -> None:
        """Forget a worker that takes no more requests; no request is held for it.

        Its blocks stay until they are the oldest: to look for them among a million would stop the event loop.
        """
        del self._blocks[worker]


def _blocks(body: bytes) -> Iterator[int]:
    """Yield a hash for each whole block of `body`, of everything up to the end of it."""
    whole = min(len(body) // _BLOCK, _MAX_BLOCKS)
    known = 0
    for number in range(whole):
        known = hash((known, body[number * _BLOCK : (number + 1) * _BLOCK]))
        yield known
