"""Where a request had better go, by its session, its adapter and its beginning: what the router knows of all three.

Plain data: no I/O, no clock, no asyncio.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Container, Hashable, Iterator, Mapping
from typing import Generic, TypeVar

from lmi_server.contract.protocol import ADAPTER_HEADER, Input
from lmi_server.serving.dispatch.sticky_sessions import StickySessions

# The body is not parsed: a text inside a prompt that looks like the field costs time, and nothing else.
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]{1,256})"')
_SEARCHED = 4096  # bytes at the beginning and at the end of a body
_LONGEST_NAME = 256  # characters; clients choose the names that they send, and longer ones are not remembered
_BLOCK = 256  # bytes
_MAX_BLOCKS = 64  # of a body: what is behind 16 KiB does not count
_REMEMBERED = 200_000  # blocks of 130 bytes; the least recently used are forgotten first
_REMEMBERED_PER_WORKER = 1_000  # if that is more: many workers serve many conversations at a time
_MIN_SHARE = 0.5  # of a body that must be known: many bodies begin alike, and differ in what is long
_MAX_AHEAD = 8  # requests that a worker may hold beyond the least loaded one

W = TypeVar("W", bound=Hashable)


class RequestAffinity(Generic[W]):
    """Remembers where requests went, as far as it is asked to.

    `max_adapters` is the number of adapters that a worker keeps at hand; 0 without such. `adapters` has the names that
    a body may have in `model`; a header names an adapter too.
    """

    def __init__(
        self, sessions: bool, prefixes: bool, max_adapters: int = 0, adapters: Container[str] = frozenset()
    ) -> None:
        self.sessions: StickySessions[W] | None = StickySessions() if sessions else None
        self._prefixes: PrefixAffinity[W] | None = PrefixAffinity() if prefixes else None
        self._adapters: AdapterAffinity[W] | None = AdapterAffinity(max_adapters) if max_adapters else None
        self._names = adapters

    @property
    def chooses(self) -> bool:
        """Return whether `choose` does anything that the load alone does not."""
        return self._prefixes is not None

    def choose(self, request: Input, held: Mapping[W, int]) -> W | None:
        """Return one of the workers in `held`, which has how many requests each holds; None without any.

        A worker that has the adapter comes first, then one that knows the beginning of the request, then the least
        loaded one.
        """
        if self._prefixes is None or len(held) < 2:
            return min(held, key=held.__getitem__, default=None)
        adapter = self._adapter_of(request)
        if self._adapters is not None and adapter is not None:
            held = self._adapters.narrow(adapter, held)
        return self._prefixes.choose(request.body(), held)

    def worker_of_session(self, request: Input) -> W | None:
        """Return the worker of the request's session, None if there is none."""
        return None if self.sessions is None else self.sessions.worker_of(request)

    def record(self, request: Input, worker: W) -> None:
        """Record where a request goes, so that similar ones follow."""
        if self.sessions is not None:
            self.sessions.record(request, worker)
        if self._prefixes is not None:
            self._prefixes.record(request.body(), worker)
        if self._adapters is not None and (adapter := self._adapter_of(request)) is not None:
            self._adapters.record(adapter, worker)

    def forget(self, worker: W) -> None:
        """Let requests that would go to this worker, which takes no more, go to any other."""
        for memory in (self.sessions, self._prefixes, self._adapters):
            if memory is not None:
                memory.forget(worker)

    def _adapter_of(self, request: Input) -> str | None:
        if self._adapters is None:
            return None
        named = request.properties.get(ADAPTER_HEADER)
        if named is not None:
            return named
        body = request.body()
        found = _MODEL.search(body, 0, _SEARCHED) or _MODEL.search(body, max(0, len(body) - _SEARCHED))
        name = None if found is None else found[1].decode("utf-8", "replace")
        return name if name is not None and name in self._names else None


class AdapterAffinity(Generic[W]):
    """Judges by their requests which workers have an adapter: it remembers the last `max_adapters` of each of them."""

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


class PrefixAffinity(Generic[W]):
    """Remembers which worker has computed the beginning of a request: its prefix cache need not be filled again.

    The front end does not parse bodies, so prefixes are compared as bytes: clients write the fields of a conversation
    in the same order each time. A wrong guess costs time and nothing else.
    """

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
