"""Answers for which uvicorn's way does not do: refusals, reason phrases and HTTP/1.0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from frontend.http.responses import CACHE_HEADERS, new_request_id


def refusal(status: HTTPStatus, kind: str, message: str) -> bytes:
    """Return the answer to what is refused before it is a request, in LMI's form."""
    body = msgspec.json.encode({"code": int(status), "type": kind, "message": message})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        (b"x-request-id", new_request_id().encode()),
        *CACHE_HEADERS,
    ]
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    return b"%b%b\r\n%b" % (head, lines, body)


def disconnect(cycle: RequestResponseCycle | None) -> None:
    """Tell the task of a request that nothing can be sent to the client any more."""
    if cycle is not None and not cycle.response_complete:
        cycle.disconnected = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()


def without_chunks(cycle: RequestResponseCycle, app: Any) -> Any:
    """Return `app` for HTTP/1.0, which knows no chunks: the end of a stream is the end of the connection."""

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            cycle.chunked_encoding = False
        else:  # uvicorn compares each part with the announced length; there is none, so announce each part
            cycle.expected_content_length = len(message.get("body", b""))
        await cycle.send(message)

    async def unframed(scope: Any, receive: Any, _: Any) -> None:
        await app(scope, receive, send)

    return unframed


class LingeringTransport:
    """Stands in for the transport of an answer whose request has not ended, and closes it by `close`."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class PhrasingTransport:
    """Stands in for the transport of an answer until its first line is written, and changes the phrase in it."""

    def __init__(self, cycle: RequestResponseCycle, phrase: str) -> None:
        self._cycle = cycle
        self._phrase = phrase.encode("ascii")
        self._transport = cycle.transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._cycle.transport = self._transport
        line, separator, rest = data.partition(b"\r\n")
        protocol, status = line.split(b" ", 2)[:2]
        self._transport.write(b"%b %b %b%b%b" % (protocol, status, self._phrase, separator, rest))
