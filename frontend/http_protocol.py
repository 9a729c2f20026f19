"""uvicorn's HTTP protocol with what a relay needs beside ASGI: who went away, and a way to drop a client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_EXTENSION = "lmi_server.connection"

_INVALID_HTTP = msgspec.json.encode({"code": 400, "type": "BadRequestException", "message": "Invalid HTTP message."})


class RelayProtocol(HttpToolsProtocol):
    """One connection. ASGI tells of a disconnect only to a task that waits for it; a callback costs nothing."""

    _on_gone: Callable[[], None] | None = None

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` once when the client goes away before `unwatch`; at once where it has."""
        if self.transport.is_closing():
            on_gone()
            return
        self._on_gone = on_gone
        self.flow.resume_reading()  # a long body may have paused it; the end of file must be seen

    def unwatch(self) -> None:
        self._on_gone = None

    def abort(self) -> None:
        """Drop the client, and what it has not read."""
        transport = cast("asyncio.Transport | None", self.transport)
        if transport is not None:
            transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: cast("dict[object, object]", self)}

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP as LMI does. `msg` is uvicorn's own text."""
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(_INVALID_HTTP)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + _INVALID_HTTP)
        self.transport.close()


def connection_of(scope: Any) -> RelayProtocol:
    """Return the connection of a request."""
    return cast(RelayProtocol, scope["extensions"][_EXTENSION])
