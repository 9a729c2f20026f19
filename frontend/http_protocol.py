"""uvicorn's HTTP protocol with what a relay needs and ASGI lacks: news of clients that go away, a way to drop one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast
from uuid import uuid4

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from frontend.responses import CACHE_HEADERS

_EXTENSION = "lmi_server.connection"
_NAMES = "lmi_server.header_names"
_MAX_HEAD = 64 * 1024  # bytes of request line and headers

_TOO_LONG = "Request line and headers are longer than 64 KiB."
_INVALID = "Invalid HTTP message."
_OTHER_VERSION = "Only HTTP/1.0 and HTTP/1.1 are spoken here."
# As uvicorn sets them, and HTTP/1.2 and later are served as HTTP/1.1 (RFC 9110, section 2.5).
_LENIENCIES = {"lenient_data_after_close": True, "lenient_version": True}


class _RefusedError(Exception):
    """Raised through the parser, to stop it."""


class RelayProtocol(HttpToolsProtocol):
    """One connection.

    ASGI reports a disconnect only to a task that waits for it, which would cost a second task for each request. The
    callback of `watch` costs nothing.

    It also bounds the head of a request, which uvicorn does not. The parser reports nothing before the end of a header,
    so that a head without an end would grow for ever. The bytes of a head are counted read by read, which is exact
    enough: only if this upper bound is exceeded, `_head_size` counts them one by one.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.parser.set_dangerous_leniencies(**_LENIENCIES)
        self._on_gone: Callable[[], None] | None = None
        self._answering: RequestResponseCycle | None = None
        self._names: list[bytes] = []  # of the headers of the request that arrives
        self._in_head = False  # from the first byte of a request to the end of its headers
        self._read_size = 0  # bytes of this read
        self._head_began = False  # in this read
        self._first_read = 0  # bytes of the read in which the head began; not all of them need be its own
        self._head_read = 0  # bytes of the head in the whole reads after that one
        self._refusal: tuple[HTTPStatus, str] | None = None  # why the head of a request is refused
        self._rejected = False  # what arrived is not HTTP; nothing that follows can be

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` once if the client goes away before `unwatch`; at once if it is gone already."""
        if self.transport.is_closing():
            on_gone()
            return
        self._on_gone = on_gone
        self.flow.resume_reading()  # a long body may have paused it, and a paused transport sees no end of file

    def unwatch(self) -> None:
        self._on_gone = None

    def abort(self) -> None:
        """Drop the client and everything that it has not read."""
        transport = cast("asyncio.Transport | None", self.transport)
        if transport is not None:
            transport.abort()

    # --- what arrives ---

    def data_received(self, data: bytes) -> None:
        """Feed the parser. A request for an upgrade is served in HTTP/1.1, as RFC 9110 (section 7.8) allows."""
        if self._rejected:
            return
        self._unset_keepalive_if_required()
        self._read_size = len(data)
        self._head_began = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._serve_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            status, text = self._refusal or (HTTPStatus.BAD_REQUEST, _INVALID)
            self._reject(status, "BadRequestException", text)
            return
        if self._in_head and not self._head_began:
            self._head_read += len(data)
            if self._head_read > _MAX_HEAD:
                self._reject(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "BadRequestException", _TOO_LONG)

    def _should_upgrade(self) -> bool:
        """Keep uvicorn from answering a request for an upgrade, which `_serve_without_upgrade` parses again."""
        return True

    def _serve_without_upgrade(self, rest: bytes) -> None:
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response(_INVALID)
            return
        head = [b"%b %b HTTP/%b\r\n" % (method, self.url, self.parser.get_http_version().encode())]
        head += [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(**_LENIENCIES)
        self.data_received(b"".join([*head, b"\r\n", rest]))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep the name as it is written, too: ASGI has names in lower case, users' code gets the client's."""
        self._names.append(name)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        bound = self._first_read + self._head_read + (0 if self._head_began else self._read_size)
        if bound > _MAX_HEAD and self._head_size() > _MAX_HEAD:
            self._refusal = (HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LONG)
            raise _RefusedError
        if not self.parser.get_http_version().startswith("1."):
            self._refusal = (HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, _OTHER_VERSION)
            raise _RefusedError
        super().on_headers_complete()

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._head_began = True
        self._first_read, self._head_read = self._read_size, 0
        self._names = []
        self.scope["extensions"] = cast("dict[str, dict[object, object]]", {_EXTENSION: self, _NAMES: self._names})

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()

    # --- what is answered ---

    def set_reason(self, phrase: str) -> None:
        """Set the reason phrase of the answer that comes next, for which ASGI has no field."""
        assert self._answering is not None
        self._answering.transport = cast("asyncio.Transport", _Phrased(self._answering, phrase))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, _without_chunks(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, in LMI's form."""
        self._reject(HTTPStatus.BAD_REQUEST, "BadRequestException", msg)

    def _reject(self, status: HTTPStatus, kind: str, message: str) -> None:
        """Stop reading. Answer, unless the client could take that for (a part of) the answer to an earlier request."""
        self._rejected = True
        cycle = self.cycle
        if self.transport.is_closing():
            return
        if cycle is None or cycle.response_complete:
            self._refuse(status, kind, message)
        elif cycle.response_started or (cycle.more_body and self.pipeline):
            self.abort()
        elif cycle.more_body:  # the error is in the body of this very request
            self._refuse(status, kind, message)
        else:
            cycle.keep_alive = False  # an answer is on its way; the connection ends after it

    def _refuse(self, status: HTTPStatus, kind: str, message: str) -> None:
        body = msgspec.json.encode({"code": int(status), "type": kind, "message": message})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            (b"x-request-id", str(uuid4()).encode()),
            *CACHE_HEADERS,
        ]
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(b"%b%b\r\n%b" % (head, lines, body))
        self.transport.close()


class _Phrased:
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


def _without_chunks(cycle: RequestResponseCycle, app: Any) -> Any:
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


def connection_of(scope: Any) -> RelayProtocol:
    """Return the connection of a request."""
    return cast(RelayProtocol, scope["extensions"][_EXTENSION])


def header_names(scope: Any) -> list[bytes]:
    """Return the names of a request's headers as the client wrote them."""
    return cast("list[bytes]", scope["extensions"][_NAMES])
