"""How the answer to one inference request is written."""

from __future__ import annotations

import asyncio
import functools

from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE

from frontend.http.clients import Send
from frontend.http.protocol import ClientConnection
from lmi_server.contract.protocol import Head

_PART = 256 * 1024  # bytes of a whole answer that are written at once
_WITHOUT_BODY = frozenset({204, 205, 304})
_RESET_CONTENT = 205  # the one of them that says how long its body is (RFC 9110, section 15.3.6)
_SET_HERE = frozenset({"cache-control", "expires", "pragma", "x-request-id"})  # whatever a handler says
_FRAMING = frozenset({"connection", "content-length", "transfer-encoding"})  # uvicorn acts on them


class RelayedResponse:
    """Writes the answer to one request as ASGI messages. `headers` are added to every answer."""

    __slots__ = ("_connection", "_has_body", "_headers", "_request_id", "_send")

    def __init__(
        self, connection: ClientConnection, send: Send, request_id: str, headers: list[tuple[bytes, bytes]]
    ) -> None:
        self._connection = connection
        self._has_body = True
        self._headers = headers
        self._request_id = request_id.encode("latin-1")
        self._send = send

    async def whole(self, status: int, headers: list[tuple[str, str]], data: bytes, reason: str = "") -> None:
        if reason:
            self._connection.set_reason(reason)
        if status in _WITHOUT_BODY:
            await self._start(status, headers)
            await self.end(b"")
            return
        if len(data) <= _PART and self._write_at_once(status, headers, data):
            return
        await self._start(status, headers, (b"content-length", b"%d" % len(data)))
        last = max(len(data) - 1, 0) // _PART * _PART
        for start in range(0, last, _PART):  # each waits for the client to read: TLS would keep a copy of the whole
            await self.chunk(data[start : start + _PART])
            await asyncio.sleep(0)  # a fast client takes all at once, and other requests wait
        await self._send({"type": "http.response.body", "body": data[last:]})

    def _write_at_once(self, status: int, headers: list[tuple[str, str]], data: bytes) -> bool:
        """Write head and body of a usual answer, and return True; return False if uvicorn must check the headers."""
        lines = _checked_lines(tuple(headers))
        if lines is None or HEADER_VALUE_RE.search(self._request_id):
            return False
        own = b"".join([b"%b: %b\r\n" % header for header in self._headers])
        head = b"%bcontent-length: %d\r\nx-request-id: %b\r\n%b\r\n" % (lines, len(data), self._request_id, own)
        return self._connection.write_whole(self._send, status, head, data)

    async def begin(self, head: Head) -> None:
        if head.reason:
            self._connection.set_reason(head.reason)
        await self._start(head.status, head.headers)

    async def chunk(self, data: bytes) -> None:
        if self._has_body:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data if self._has_body else b""})

    async def _start(self, status: int, headers: list[tuple[str, str]], *more: tuple[bytes, bytes]) -> None:
        self._has_body = status not in _WITHOUT_BODY
        if status == _RESET_CONTENT:
            more = ((b"content-length", b"0"),)
        raw = [(_latin(name), _latin(value)) for name, value in headers if name.lower() not in _SET_HERE]
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*raw, *more, (b"x-request-id", self._request_id), *self._headers],
            }
        )


def _latin(text: str) -> bytes:
    """Return a handler's header as bytes, with a question mark for what Latin-1 lacks, as LMI does."""
    return text.encode("latin-1", "replace")


@functools.lru_cache(256)
def _checked_lines(headers: tuple[tuple[str, str], ...]) -> bytes | None:
    """Return the lines of a handler's headers, None if uvicorn must look at them.

    Nearly all answers of a model have the same headers: the check, which keeps a handler from writing lines of its own
    into the head, is made once for them.
    """
    lines = b""
    for name, value in headers:
        if name.lower() in _SET_HERE:
            continue
        raw_name, raw_value = _latin(name).lower(), _latin(value)
        if name.lower() in _FRAMING or HEADER_RE.search(raw_name) or HEADER_VALUE_RE.search(raw_value):
            return None
        lines += b"%b: %b\r\n" % (raw_name, raw_value)
    return lines
