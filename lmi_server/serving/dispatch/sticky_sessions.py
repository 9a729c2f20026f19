"""To which worker the requests of a session go: the worker that opened it, or had its last request.

It is about the sessions of SageMaker: the header `X-Amzn-SageMaker-Session-Id` of requests names them, and headers of
answers open and close them. The front end reads these headers, and nothing else of an answer. Clients that know nothing
of SageMaker may name a session in `X-Session-Id`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from lmi_server.contract.protocol import Input

_SESSION = "x-amzn-sagemaker-session-id"
_NEW_SESSION = "x-amzn-sagemaker-new-session-id"
_PLAIN_SESSION = "x-session-id"
_CLOSED_SESSION = "x-amzn-sagemaker-closed-session-id"
TO_BE_OPENED = "NEW_SESSION"  # by the answer
_MAX_LENGTH = 256  # characters of an id, as in SageMaker's API; a longer one is not remembered
MAX_SESSIONS = 100_000  # the least recently used is forgotten first

W = TypeVar("W", bound=Hashable)


class StickySessions(Generic[W]):
    """Remembers a worker for each session. This is a preference: the files of a session outlive its worker."""

    def __init__(self) -> None:
        self._workers: OrderedDict[str, W] = OrderedDict()

    @property
    def has_any(self) -> bool:
        """Return whether any session is remembered."""
        return bool(self._workers)

    def worker_of(self, request: Input) -> W | None:
        """Return the worker that `request` should go to; None if any will do."""
        session = session_of(request)
        return None if session is None else self._workers.get(session)

    def record(self, request: Input, worker: W) -> None:
        """Record that `worker` gets `request`."""
        session = session_of(request)
        if session is not None:
            self._remember(session, worker)

    def read_answer(self, headers: Iterable[tuple[str, str]], worker: W) -> None:
        """Record the sessions that the headers of an answer open and close."""
        for name, value in headers:
            if len(name) < len(_SESSION):  # most headers are shorter, and are not worth lower()
                continue
            match name.lower():
                case name if name in (_SESSION, _NEW_SESSION):
                    self._remember(value.partition(";")[0].strip(), worker)
                case name if name == _CLOSED_SESSION:
                    self._workers.pop(value.strip(), None)

    def forget(self, worker: W) -> None:
        """Let the sessions of a worker that takes no more requests go to any other."""
        for session in [session for session, owner in self._workers.items() if owner is worker]:
            del self._workers[session]

    def _remember(self, session: str, worker: W) -> None:
        if session == TO_BE_OPENED or len(session) > _MAX_LENGTH:
            return
        self._workers[session] = worker
        self._workers.move_to_end(session)
        if len(self._workers) > MAX_SESSIONS:
            self._workers.popitem(last=False)


def session_of(request: Input) -> str | None:
    """Return the session that a request names; None if it names none."""
    return request.properties.get(_SESSION) or request.properties.get(_PLAIN_SESSION) or None


def may_have_files(request: Input) -> bool:
    """Return whether a request is of a session of SageMaker's, whose files all workers of all versions share."""
    return _SESSION in request.properties
