"""Counts of requests, and those of each session among them: what is known without the session that weighs most.

A session stays with its version. So its client knows where its requests go, and can send there what it likes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Generic, Self, TypeVar

from lmi_server.contract.protocol import Input
from lmi_server.serving.dispatch.sticky_sessions import TO_BE_OPENED, session_of

_MAX_SESSIONS = 10_000  # sessions with counts of their own; the least recently used is forgotten first
_OTHERS = 5  # requests of other clients, without which a session is not left out


@dataclass
class RequestCounts:
    """Numbers that add up."""

    requests: int = 0

    def less(self, part: Self) -> Self:
        """Return what is left without a part."""
        names = [field.name for field in fields(self)]
        return type(self)(**{name: getattr(self, name) - getattr(part, name) for name in names})


C = TypeVar("C", bound=RequestCounts)


class SessionCounts(Generic[C]):
    """The counts of everyone in `total`, and those of each session."""

    def __init__(self, make: Callable[[], C]) -> None:
        self.total = make()
        self._make = make
        self._sessions: OrderedDict[bytes, C] = OrderedDict()

    def requests_of(self, session: bytes | None) -> int:
        """Return how many requests a session has had; 0 for the others, which are told apart by nothing."""
        own = None if session is None else self._sessions.get(session)
        return 0 if own is None else own.requests

    def counts_of(self, session: bytes | None) -> Iterator[C]:
        """Yield the counts in which a request belongs."""
        yield self.total
        if session is not None:
            own = self._sessions.setdefault(session, self._make())
            self._sessions.move_to_end(session)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
            yield own

    def without_worst(self, badness: Callable[[C], float]) -> C:
        """Return the counts without the session that has most of `badness`; with it if nearly nothing else is left."""
        if not badness(self.total):  # mostly, and thousands of sessions need no look
            return self.total
        worst = max(self._sessions.values(), key=badness, default=None)
        left = self.total if worst is None else self.total.less(worst)
        return left if left.requests >= _OTHERS else self.total


def named_session(request: Input) -> str | None:
    """Return the session of a request; None if it has none, or if its answer is to open one."""
    session = session_of(request)
    return None if session == TO_BE_OPENED else session
