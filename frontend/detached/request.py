"""A request that runs without a client: its answer is kept, and no client waits for it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import msgspec

from frontend.http.clients import Inference, Receive, Scope, Send, Target
from frontend.http.held_bytes import HeldBytes
from frontend.http.protocol import detached_scope
from lmi_server.contract.errors import NoRoomError
from lmi_server.dialects.errors import error_reply
from lmi_server.supervisor.job import ReplySlot

# Headers of one answer over HTTP, and not of the model's answer.
_OF_AN_ANSWER = frozenset({"content-length", "connection", "x-request-id", "pragma", "cache-control", "expires"})
_TURN = 256  # pieces, after which other requests have their turn: nothing else here waits
_ITEM_SIZE = 64  # bytes that a piece of an answer takes beside its content
_HERE = f"{socket.gethostname()}:{os.getpid()}"


def receive_body(body: bytes) -> Receive:
    """Return what receives a request with this whole body."""

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


class KeptAnswer(msgspec.Struct):
    """An answer, as far as there is one. `items` are the pieces in which the model has sent it."""

    status: int = 0
    reason: str = ""
    headers: list[tuple[str, str]] = []
    items: list[bytes] = []


class DetachedRequest:
    """One request, and what the relay has in place of the connection of its client.

    `accepted` is set once a queue has it, and `cancel` ends it from then on. `answer` is what its answer holds of the
    memory for answers. `has_no_room` is set once there was no room for more of it, and an error is in its place.
    """

    refused_with: int | None = None

    def __init__(self, record: KeptAnswer, answer: HeldBytes, make_room: Callable[[], object] = lambda: None) -> None:
        """Its answer goes into `record`. `make_room` is called if there is no room for more of it."""
        self.record = record
        self.answer = answer
        self._parts: list[bytes] | None = None  # those of a whole answer, which is one piece
        self.accepted = asyncio.Event()
        self.cancel: Callable[[], None] | None = None
        self.has_no_room = False
        self._make_room = make_room
        self._route = ""

    async def run(
        self, infer: Inference, target: Target, scope: Scope, receive: Receive, held: HeldBytes | None = None
    ) -> None:
        """Answer the request. `held` are its bytes, if its body is not the scope's."""
        self._route = target[0]
        await infer(target, detached_scope(scope, self, held), receive, self._keep)

    async def _keep(self, message: MutableMapping[str, Any]) -> None:
        if self.has_no_room:
            return
        if message["type"] == "http.response.start":
            headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in message["headers"]]
            self.record.status = message["status"]
            self.record.headers = [header for header in headers if header[0].lower() not in _OF_AN_ANSWER]
            self._parts = [] if any(name.lower() == "content-length" for name, _ in headers) else None
            return
        if (body := message.get("body", b"")) and not self._add(body):
            return
        if self._parts and not message.get("more_body"):
            self.record.items.append(b"".join(self._parts))
            self._parts = None
        elif body and not len(self.record.items) % _TURN:
            await asyncio.sleep(0)

    def _add(self, piece: bytes) -> bool:
        """Keep a piece of the answer; return whether there was room for it."""
        if not self.answer.add(len(piece) + _ITEM_SIZE):
            self._make_room()
            if not self.answer.add(0):
                self._give_up()
                return False
        (self.record.items if self._parts is None else self._parts).append(piece)
        return True

    def _give_up(self) -> None:
        """End the request. An error follows the part of its answer so far, which may be read."""
        self.has_no_room = True
        self._parts = None
        self.answer.release()
        record = self.record
        status, headers, body = error_reply(self._route, NoRoomError(self.answer.full))
        record.status, record.reason, record.headers = status, "", headers
        record.items = [*(b"" for _ in record.items), body]
        if self.cancel is not None:
            self.cancel()

    # --- as a connection ---

    def watch(self, on_gone: Callable[[], None], reply: ReplySlot) -> None:
        """Note that a queue has the request; `on_gone` cancels it. Its answer arrives as it was sent."""
        reply.keeps_chunks = True
        self.cancel = on_gone
        self.accepted.set()

    def unwatch(self) -> None:
        """Note that the answer is complete."""
        self.cancel = None

    def abort(self) -> None:
        """Do nothing: no client reads too slowly here."""

    def linger(self) -> None:
        """Do nothing: there is no client that could still send."""

    def write_whole(self, send: Send, status: int, head: bytes, body: bytes) -> bool:
        """Return False: the answer comes to `_keep` in its parts."""
        return False

    def set_reason(self, phrase: str) -> None:
        """Keep the reason phrase."""
        self.record.reason = phrase


def process_name() -> str:
    """Return a name of this process that no other process has had."""
    return f"{_HERE}:{time.time_ns()}"


def is_gone(name: str, own: str) -> bool:
    """Return whether the process of a name was one of this machine and has ended. `own` is the name of this process.

    A container that starts again may give its process the number of the one before.
    """
    host, _, rest = name.partition(":")
    pid = rest.partition(":")[0]
    if host != socket.gethostname() or name == own:
        return False
    return f"{host}:{pid}" == _HERE or not os.path.exists(f"/proc/{pid}")
