"""Where a request had better go, by its session, its adapter and its beginning: what the router knows of all three."""

from __future__ import annotations

import re
from collections.abc import Container, Hashable, Mapping
from typing import Generic, TypeVar

from lmi_server.contract.protocol import ADAPTER_HEADER, Input
from lmi_server.serving.dispatch.affinity.adapter_affinity import AdapterAffinity
from lmi_server.serving.dispatch.affinity.prefix_affinity import PrefixAffinity
from lmi_server.serving.dispatch.affinity.sticky_sessions import StickySessions

# The body is not parsed: a text inside a prompt that looks like the field costs time, and nothing else.
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]{1,256})"')
_SEARCHED = 4096  # bytes at the beginning and at the end of a body

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
