"""Which requests a new version gets."""

from __future__ import annotations

import hashlib
import os
from contextvars import ContextVar
from random import random

from frontend.canary.sessions import named_session
from lmi_server.contract.protocol import Input
from lmi_server.serving.pool.worker_pool import WorkerPool

_DRAWN: ContextVar[tuple[Input, float] | None] = ContextVar("_DRAWN", default=None)
"""The number that was drawn for the request which the running task serves."""


class Draw:
    """Draws a share of the requests: sessions as a whole, and all other requests one by one."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._salt = os.urandom(16)

    def includes(self, request: Input, old: WorkerPool, new: WorkerPool) -> bool:
        """Return whether the new version gets a request, or its copy; the same for the same request."""
        session = named_session(request)
        if session is None:
            return self._includes_by_chance(request)
        for pool, drawn in ((old, False), (new, True)):
            sessions = pool.dispatcher.router.sessions
            if sessions is not None and sessions.worker_of(request) is not None:
                return drawn
        return int.from_bytes(self._digest(session)) < self.share * 2**64

    def session(self, request: Input, tenant: bytes) -> bytes | None:
        """Return what stands for the session of a request, None if it has none. No API key has that of another."""
        session = named_session(request)
        return None if session is None else self._digest(session, tenant)

    def _includes_by_chance(self, request: Input) -> bool:
        """Draw a number, and not one that follows from the request's id: the client may have chosen that."""
        drawn = _DRAWN.get()
        if drawn is None or drawn[0] is not request:
            drawn = (request, random())
            _DRAWN.set(drawn)
        return drawn[1] < self.share

    def _digest(self, session: str, tenant: bytes = b"") -> bytes:
        name = session.encode("utf-8", "replace")
        return hashlib.blake2b(tenant + name, digest_size=8, key=self._salt).digest()
