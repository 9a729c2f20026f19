"""Passes a response on to its client, with the fields that only the store knows, and keeps it at its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

import msgspec

from frontend.http.clients import Send
from lmi_server.dialects.framing import named_event

Keep = Callable[[dict[str, Any]], Awaitable[bool]]
"""Keeps a response object; returns False if that fails."""

_WITH_RESPONSE = frozenset(
    f"response.{kind}" for kind in ("created", "queued", "in_progress", "completed", "incomplete", "failed")
)
_LAST = frozenset({"response.completed", "response.incomplete", "response.failed"})
_BLANK_LINE = b"\n\n"


class ResponseCapture:
    """What ASGI calls `send`. `own` are the fields of the response object that replace the model's.

    `keep` gets the object before the client has its end: so a client that has read it may name it at once.
    """

    def __init__(self, send: Send, own: dict[str, Any], keep: Keep | None) -> None:
        self._send = send
        self._own = own
        self._keep = keep
        self._start: MutableMapping[str, Any] | None = None  # of an answer whose body is awaited
        self._is_stream = False
        self._is_error = False
        self._parts: list[bytes] = []

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._is_error:
            await self._send(message)
        elif self._is_stream:
            await self._continue(message)
        else:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body"):
                await self._end()

    async def _begin(self, message: MutableMapping[str, Any]) -> None:
        content_type = next((value for name, value in message["headers"] if name.lower() == b"content-type"), b"")
        self._is_stream = content_type.startswith(b"text/event-stream")
        self._is_error = message["status"] != HTTPStatus.OK
        if self._is_stream or self._is_error:
            await self._send(message)
        else:
            self._start = message

    async def _end(self) -> None:
        """Send the whole response."""
        data = b"".join(self._parts)
        response = _object(data)
        if response is not None:
            data = msgspec.json.encode(await self._without_request(response))
        assert self._start is not None
        headers = [header for header in self._start["headers"] if header[0].lower() != b"content-length"]
        await self._send({**self._start, "headers": [*headers, (b"content-length", b"%d" % len(data))]})
        await self._send({"type": "http.response.body", "body": data})

    async def _without_request(self, response: dict[str, Any]) -> dict[str, Any]:
        response.update(self._own)
        if self._keep is not None and not await self._keep(response):
            response["store"] = False
        return response

    async def _continue(self, message: MutableMapping[str, Any]) -> None:
        """Send the events that are whole by now."""
        self._parts.append(message.get("body", b""))
        data = b""
        if _BLANK_LINE in self._parts[-1] or self._parts[-1].startswith(b"\n") or not message.get("more_body"):
            *events, rest = b"".join(self._parts).split(_BLANK_LINE)
            self._parts = [rest]
            data = b"".join([await self._event(event) for event in events])
        if not message.get("more_body"):
            data += b"".join(self._parts)
        if data or not message.get("more_body"):
            await self._send({**message, "body": data})

    async def _event(self, event: bytes) -> bytes:
        head, _, data = event.partition(b"\n")
        kind = head.removeprefix(b"event: ").decode("latin-1")
        value = _object(data.removeprefix(b"data: ")) if kind in _WITH_RESPONSE else None
        if value is None or not isinstance(value.get("response"), dict):
            return event + _BLANK_LINE
        response: dict[str, Any] = value["response"]
        if kind in _LAST:
            await self._without_request(response)
        else:
            response.update(self._own)
        return named_event(kind, value)


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
