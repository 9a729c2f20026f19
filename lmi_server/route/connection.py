"""HTTP/1.1 connections to one server: each has one request at a time, and is used again after a whole answer."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import NamedTuple, Protocol, cast

import httptools

_CONNECT_S = 5.0
_MAX_HEAD = 128 * 1024  # bytes; also of trailers, and of anything else that is no part of a body
_MAX_HEADERS = 500
_IDLE_S = 3.0  # below the 5 seconds after which uvicorn, and so most servers of models, close an idle connection
_MAX_IDLE = 256
_INTERIM = range(100, 200)
_FINAL = range(200, 600)  # RFC 9110, section 15

Headers = list[tuple[bytes, bytes]]


class Receiver(Protocol):
    """What becomes of an answer. After `on_end` or `on_break` nothing follows."""

    def on_head(self, status: int, headers: Headers, length: int | None) -> None:
        """Take the head; `length` is that of the body in bytes, None if it is not known."""

    def on_body(self, data: bytes) -> None:
        """Take a part of the body."""

    def on_end(self) -> None:
        """Take the end of a whole answer."""

    def on_break(self, reason: str) -> None:
        """Take the end of an answer that is not whole; `reason` goes on "the server ..."."""


class Peer(NamedTuple):
    """Where one server is: an address in digits, the port, and the name for TLS, which is None without TLS."""

    address: str
    port: int
    context: ssl.SSLContext | None = None
    name: str | None = None


class _AnswerError(Exception):
    """The answer is not one that goes on."""


class Connection(asyncio.Protocol):
    """One connection. `on_free` is called when it may be used again."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self.idle_since = 0.0
        self._is_held = False
        self._renew()

    def _renew(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._head_bytes = 0
        self._bodiless = 0  # bytes since the head, or since the last part of the body
        self._in_head = True
        self._until_close = False
        self._complete = False
        self._stays = False
        self._spoilt = False  # something followed the answer

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes, receiver: Receiver) -> None:
        """Send a request whose answer goes to `receiver`."""
        assert self._transport is not None
        self._renew()
        self._receiver = receiver
        if len(body) < _MAX_HEAD:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    def hold(self, held: bool) -> None:
        """Read no more for a while, or go on."""
        if held != self._is_held and self.is_open and self._transport is not None:
            self._is_held = held
            if held:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once; the receiver gets nothing more."""
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._connections.drop(self)
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if self._until_close and not self._in_head and exc is None:
            receiver.on_end()
        else:
            receiver.on_break(
                "closed the connection " + ("before it answered" if self._in_head else "within its answer")
            )

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            self.abort()  # nothing was asked
            return
        if self._in_head:
            if self._head_bytes > _MAX_HEAD:
                self._fail(f"sent a head of more than {_MAX_HEAD} bytes")
                return
            self._head_bytes += len(data)
        self._bodiless += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("changed the protocol")
        except httptools.HttpParserError as error:
            if not self._complete:
                cause = error.__context__
                self._fail(str(cause) if isinstance(cause, _AnswerError) else "sent what is not HTTP")
                return
            self._spoilt = True
        if self._complete:
            self._finish()
        elif not self._in_head and self._bodiless > _MAX_HEAD:
            self._fail(f"sent more than {_MAX_HEAD} bytes of trailers")

    def _finish(self) -> None:
        receiver, self._receiver = self._receiver, None
        self.hold(False)
        is_sending = self._transport is not None and self._transport.get_write_buffer_size() > 0
        if self._spoilt or is_sending or not self._stays:
            self.abort()
        else:
            self._connections.keep(self)
        if receiver is not None:
            receiver.on_end()

    def _fail(self, reason: str) -> None:
        receiver, self._receiver = self._receiver, None
        self.abort()
        if receiver is not None:
            receiver.on_break(reason)

    # --- the parser's side ---

    def on_message_begin(self) -> None:
        self._spoilt = self._spoilt or self._complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head or self._complete:
            return  # a trailer
        self._headers.append((name, value))
        if len(self._headers) > _MAX_HEADERS:
            raise _AnswerError(f"sent more than {_MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        status = self._parser.get_status_code()
        if status in _INTERIM:
            return
        if status not in _FINAL:
            raise _AnswerError(f"answered with {status}, which is no status of HTTP")
        self._in_head = False
        self._bodiless = 0
        names = {name.lower(): value for name, value in self._headers}
        length = names.get(b"content-length")
        has_body = status not in (204, 304)
        self._until_close = has_body and length is None and b"transfer-encoding" not in names
        receiver = self._receiver
        if receiver is not None:
            size = int(length) if length is not None and length.isdigit() and len(length) < 20 else None
            receiver.on_head(status, self._headers, size if has_body else 0)

    def on_body(self, body: bytes) -> None:
        self._bodiless = 0
        if self._receiver is not None and not self._complete:
            self._receiver.on_body(body)

    def on_message_complete(self) -> None:
        if self._in_head:  # an interim answer, such as 103
            self._headers = []
        else:
            self._complete = True
            self._stays = bool(self._parser.should_keep_alive())  # the parser knows it in this call alone


class Connections:
    """The connections to one server. Idle ones are used again, the newest first, and closed after some seconds."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._idle: list[Connection] = []
        self._keeps = True

    def idle(self) -> Connection | None:
        """Return a connection that waits for a request, None if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.monotonic() - connection.idle_since < _IDLE_S:
                return connection
            connection.abort()
        return None

    async def open(self) -> Connection:
        """Open a connection. Raises OSError, which TimeoutError is too."""
        peer = self.peer
        async with asyncio.timeout(_CONNECT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self), peer.address, peer.port, ssl=peer.context, server_hostname=peer.name
            )
        if not connection.is_open:  # it was reset before this task went on
            raise ConnectionResetError("the server closed the connection at once")
        return connection

    def keep(self, connection: Connection) -> None:
        """Take back a connection whose answer has ended."""
        if not self._keeps or len(self._idle) >= _MAX_IDLE:
            connection.abort()
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def drop(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close_idle(self, older_s: float = _IDLE_S) -> None:
        """Close the connections that have been idle for so long."""
        now = time.monotonic()
        for connection in [each for each in self._idle if now - each.idle_since >= older_s]:
            self._idle.remove(connection)
            connection.abort()

    def retire(self) -> None:
        """Close each connection once it has no request: idle ones are not watched from now on."""
        self._keeps = False
        self.close_idle(0.0)
