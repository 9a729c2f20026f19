"""A request that runs without a client: its answer is kept, and nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from frontend.clients import Receive, Scope, Send
from frontend.http_protocol import detached_scope
from frontend.job_store import JobRecord
from lmi_server.supervisor.job import ReplySlot

Target = tuple[str, str | None, str | None]
"""Route, name and version of the model, as the relay takes them."""
Inference = Callable[[str, "str | None", "str | None", Scope, Receive, Send], Awaitable[None]]

# What belongs to one answer over HTTP, and not to that of the model.
_OF_AN_ANSWER = frozenset({"content-length", "connection", "x-request-id", "pragma", "cache-control", "expires"})
_TURN = 256  # pieces, after which other requests have their turn: nothing else here waits
_ITEM_SIZE = 64  # bytes that a piece of an answer takes beside its content


class DetachedRequest:
    """One request, and what the relay has in place of the connection of its client.

    `accepted` is set once a queue has it, and `cancel` ends it from then on.
    """

    refused_with: int | None = None

    def __init__(self, record: JobRecord) -> None:
        """Its answer goes into `record`."""
        self.record = record
        self.size = 0  # bytes of memory that the answer takes
        self._parts: list[bytes] | None = None  # those of a whole answer, which is one piece
        self.accepted = asyncio.Event()
        self.cancel: Callable[[], None] | None = None

    async def run(self, infer: Inference, target: Target, scope: Scope, receive: Receive) -> None:
        """Answer the request."""
        await infer(*target, detached_scope(scope, self), receive, self._keep)

    async def _keep(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in message["headers"]]
            self.record.status = message["status"]
            self.record.headers = [header for header in headers if header[0].lower() not in _OF_AN_ANSWER]
            self._parts = [] if any(name.lower() == "content-length" for name, _ in headers) else None
            return
        if body := message.get("body", b""):
            self.size += len(body) + _ITEM_SIZE
            (self.record.items if self._parts is None else self._parts).append(body)
            if not len(self.record.items) % _TURN:
                await asyncio.sleep(0)
        if self._parts and not message.get("more_body"):
            self.record.items.append(b"".join(self._parts))

    # --- as a connection ---

    def watch(self, on_gone: Callable[[], None], reply: ReplySlot) -> None:
        """Note that a queue has the request, which `on_gone` cancels. Its answer arrives as it was sent."""
        reply.keeps_chunks = True
        self.cancel = on_gone
        self.accepted.set()

    def unwatch(self) -> None:
        """Note that the answer is complete."""
        self.cancel = None

    def abort(self) -> None:
        """Do nothing: nobody reads too slowly here."""

    def linger(self) -> None:
        """Do nothing: there is no client that could still send."""

    def write_whole(self, send: Send, status: int, head: bytes, body: bytes) -> bool:
        """Return False: the answer comes to `_keep` in its parts."""
        return False

    def set_reason(self, phrase: str) -> None:
        """Keep the reason phrase."""
        self.record.reason = phrase
