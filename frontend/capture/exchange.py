"""A request and its answer, taken down on their way through ASGI."""

from __future__ import annotations

import threading
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from frontend.http.clients import Receive, Scope, Send

_OVERHEAD = 512  # bytes of an exchange without any text


class Budget:
    """Counts bytes up to `limit`, in any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, count: int) -> bool:
        """Count so many bytes more; return False, and count nothing, if there is no room."""
        with self._lock:
            if self._taken + count > self._limit:
                return False
            self._taken += count
            return True

    def give_back(self, count: int) -> None:
        with self._lock:
            self._taken -= count

    @property
    def taken(self) -> int:
        return self._taken


@dataclass(slots=True)
class Part:
    """The body of one direction: its first bytes, and whether there were more."""

    content_type: str = ""
    data: bytearray = field(default_factory=bytearray)
    is_cut: bool = False


class CapturedExchange:
    """Takes down up to `limit` bytes of each body; all that is held counts in `budget` until `release`.

    `is_lost` is true if the budget had no room for some of them: the exchange is dropped then. `began` and `ended` are
    times of time.monotonic(), `arrived` is a time.time().
    """

    def __init__(self, route: str, scope: Scope, limit: int, budget: Budget) -> None:
        self.route = route
        self.path: str = scope["path"]
        self.status = 0
        self.arrived, self.began, self.ended = time.time(), time.monotonic(), 0.0
        self.request, self.answer = Part(), Part()
        self.inference_id = ""
        self.is_lost = False
        self._limit = limit
        self._budget = budget
        self._taken = 0
        for name, value in scope["headers"]:
            if name == b"content-type":
                self.request.content_type = value.decode("latin-1")
            elif name == b"x-amzn-sagemaker-inference-id":
                self.inference_id = value.decode("latin-1")
        self._hold(_OVERHEAD + len(self.path) + len(self.request.content_type) + len(self.inference_id))

    def receiving(self, receive: Receive) -> Receive:
        """Return what takes down the body that `receive` returns."""

        async def take() -> MutableMapping[str, Any]:
            message = await receive()
            self._add(self.request, message.get("body", b""))
            return message

        return take

    def sending(self, send: Send) -> Send:
        """Return what takes down the answer that goes to `send`."""

        async def take(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                headers = message.get("headers", ())
                content_type = next((value for name, value in headers if name.lower() == b"content-type"), b"")
                if self._hold(len(content_type)):
                    self.answer.content_type = content_type.decode("latin-1")
            else:
                self._add(self.answer, message.get("body", b""))
            await send(message)

        return take

    def release(self) -> None:
        """Count the bytes no more."""
        self._budget.give_back(self._taken)
        self._taken = 0

    def _add(self, part: Part, data: bytes) -> None:
        room = self._limit - len(part.data)
        part.is_cut = part.is_cut or len(data) > room
        taken = data[:room]
        if taken and self._hold(len(taken)):
            part.data += taken

    def _hold(self, count: int) -> bool:
        """Count so many bytes more; return False if the exchange is lost."""
        self.is_lost = self.is_lost or not self._budget.take(count)
        if not self.is_lost:
            self._taken += count
        return not self.is_lost
