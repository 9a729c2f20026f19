"""uvicorn's HTTP protocol with what a relay needs and ASGI lacks: news of clients that go away, a way to drop one."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import re
import socket
import sys
import termios
from collections.abc import Callable, MutableMapping
from http import HTTPStatus
from typing import Any, cast

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from frontend.http.clients import Send
from frontend.http.connection_limits import ConnectionLimits
from frontend.http.held_bytes import HeldBytes
from frontend.http.request_ids import new_request_id
from frontend.http.responses import CACHE_HEADERS
from lmi_server.supervisor.job import ReplySlot

_EXTENSION = "lmi_server.connection"
_NAMES = "lmi_server.header_names"
_HELD = "lmi_server.held_bytes"
_MAX_HEAD = 64 * 1024  # bytes of request line and headers, or of what is around the chunks of a body
_MAX_HEADERS = 500  # of a request: each takes time and memory, however short it is
_MAX_WAITING = 1000  # requests that a client has sent before the answer to an earlier one
_MAX_PARTS = 2000  # of a body, beside those of _SMALL_PART bytes: each takes time, as a chunk of one byte does
_SMALL_PART = 64
_WAITING_SIZE = 4 * 1024  # bytes that Python takes for each of them
_SMALL_HEAD = 8 * 1024  # bytes that are not counted: nearly all heads are smaller
_HEAD_COPIES = 2  # the headers of the connection, and the properties that are made of them
_WRITE_BUFFER = 64 * 1024  # bytes that wait for a client, from which on more is not written
_LINGER_S = 30  # for a client to send the rest of a request that was refused
_LAST_LINGER_S = 0.2  # the same, when the server ends
_PROBE_S = 0.1
# What may be sent to a client before its answer goes on: an interim answer, or a zero in front of the size of a chunk.
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LEADING_ZERO = b"0"
_TCP_CLOSE = 7  # the state of a connection that the client has reset

_TOO_LONG = "Request line and headers are longer than 64 KiB."
_INVALID = "Invalid HTTP message."
_TOO_MANY_HEADERS = f"The request has more than {_MAX_HEADERS} headers."
_TOO_MANY_WAITING = f"More than {_MAX_WAITING} requests wait for an earlier one on this connection."
_TOO_MANY_PARTS = f"The body comes in more than {_MAX_PARTS} chunks that are shorter than {_SMALL_PART} bytes."
_TOO_MUCH_FRAMING = "Chunk extensions or trailers are longer than 64 KiB."
# Two proxies, or a proxy and this server, could take different ones for the host (RFC 9112, section 3.2). A request
# without any is served, as in LMI.
_WRONG_HOST = "The header Host is sent twice, or is not a host with an optional port."
_HOST = re.compile(rb"(?:\[[0-9A-Za-z:.%_~-]*\]|[0-9A-Za-z._~%!$&'()*+,;=-]*)(?::[0-9]*)?")
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

    `check` ends connections that take too long. A client that only ends its own side still gets its answer.
    """

    def __init__(self, limits: ConnectionLimits, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._limits = limits
        self._checks_without_data = 0
        self._checks_in_head = 0  # or without any request
        self._checks_in_body = self._arrived = 0  # of one request, and the bytes that have come of it
        self._parts = 0  # of the body of one request, as they have come
        self._checks_closing = 0  # since the connection is closed, as far as the client lets it
        self._had_body = False  # in this read
        self._framing_size = 0  # bytes of reads without any of the body, since the last one with some
        self._unread = self._checks_unread = 0  # bytes that the client has not read; checks since it read some
        self._unread_size = 0  # bytes that `limits` counts as unread
        self._unread_at_pause = 0  # bytes that the client had not read when the pause began
        self._checks_paused = 0  # since the client has left so much unread that nothing more is written
        self._reply: ReplySlot | None = None  # the answer that is watched
        self._checks_lingering: int | None = None  # since an answer was sent before the end of its request
        self._is_half_closed = False  # the client has ended its side
        self.parser.set_dangerous_leniencies(**_LENIENCIES)
        self._on_gone: Callable[[], None] | None = None
        self._answering: RequestResponseCycle | None = None
        self._names: list[bytes] = []  # of the headers of the request that arrives
        self._in_head = False  # from the first byte of a request to the end of its headers
        self._read_size = 0  # bytes of this read
        self._head_began = False  # in this read
        self._head_held: HeldBytes | None = None  # of a request whose head has not arrived, or was refused
        self._first_read = 0  # bytes of the read in which the head began; not all of them need be its own
        self._head_read = 0  # bytes of the head in the whole reads after that one
        self._refusal: tuple[HTTPStatus, str, str] | None = None  # why a request is refused: status, type, message
        self._rejected = False  # what arrived is not HTTP; nothing that follows can be
        self.refused_with: int | None = None  # the status that the request got while its body was read

    def watch(self, on_gone: Callable[[], None], reply: ReplySlot) -> None:
        """Call `on_gone` once if the client goes away before `unwatch`; at once if it is gone already.

        What waits in `reply` counts as unread.
        """
        self._reply = reply
        if self.transport.is_closing():
            _disconnect(self._answering)
            on_gone()
            return
        self._on_gone = on_gone
        self.flow.resume_reading()  # a long body may have paused it, and a paused transport sees no end of file

    def unwatch(self) -> None:
        self._on_gone = self._reply = None

    def abort(self) -> None:
        """Drop the client and everything that it has not read."""
        transport = cast("asyncio.Transport | None", self.transport)
        if transport is not None:
            transport.abort()

    # --- limits ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        if self.scheme == "https":  # the default is 512 KiB, beside what the transport below TLS holds
            transport.set_write_buffer_limits(_WRITE_BUFFER)
        if len(self.connections) > self._limits.max_connections:
            self._limits.note_full()
            self._rejected = True
            self._limits.count_refusal(HTTPStatus.SERVICE_UNAVAILABLE)
            self._write_refusal(HTTPStatus.SERVICE_UNAVAILABLE, "WlmException", self._limits.too_many)
            transport.close()

    def check(self) -> None:
        """Look once a second whether the client takes too long, or is gone without having said so."""
        self._checks_without_data += 1
        cycle = self.cycle
        if self.transport.is_closing():
            self._check_closing()
            return
        if self.flow.write_paused:
            self._checks_paused += 1
            self._count_unread()
            self._check_reader()
        if self._checks_lingering is not None:
            self._checks_lingering += 1
            if self._checks_lingering > _LINGER_S:
                self.transport.close()
        elif cycle is None or cycle.response_complete:
            self._check_head(nothing_came=cycle is None and not self._in_head)
        elif cycle.more_body:
            self._check_body()
        elif self._is_half_closed:
            self._drop_if_reset()

    def _check_closing(self) -> None:
        """Drop a client that does not read its last bytes, without which the connection is not closed."""
        self._checks_closing += 1
        if self._checks_closing > self._limits.read_timeout_s:
            self.abort()

    def _check_body(self) -> None:
        """Refuse a body that pauses, or comes too slowly: a byte now and then is no pause."""
        if self.flow.read_paused:
            return
        self._checks_in_body += 1
        limits = self._limits
        if self._checks_without_data > limits.body_timeout_s:
            self._reject(HTTPStatus.REQUEST_TIMEOUT, "RequestTimeoutException", limits.paused_body)
        elif self._checks_in_body > limits.body_timeout_s + limits.transfer_s(self._arrived):
            self._reject(HTTPStatus.REQUEST_TIMEOUT, "RequestTimeoutException", limits.slow_body)

    def _check_reader(self) -> None:
        """Drop a client that has not read a byte of its answer for too long, or reads too slowly."""
        unread = self.transport.get_write_buffer_size() + _unacknowledged(self.transport.get_extra_info("socket"))
        self._checks_unread = 0 if unread < self._unread else self._checks_unread + 1
        self._unread = unread
        if self._checks_paused == 1:
            self._unread_at_pause = unread
        limit_s = self._limits.read_timeout_s
        has_read_s = self._limits.transfer_s(max(0, self._unread_at_pause - unread))
        if self._checks_unread > limit_s or self._checks_paused > limit_s + has_read_s:
            self._limits.note_unread(unread)
            self.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._checks_paused = 0
        self._count_unread()

    def resume_writing(self) -> None:
        """Note that the client has read: what waited for it is nearly gone, however full the buffer is again soon."""
        self._checks_unread = 0
        super().resume_writing()
        self._forget_unread()

    def _count_unread(self) -> None:
        size = self.transport.get_write_buffer_size() + (0 if self._reply is None else self._reply.size)
        self._limits.unread += size - self._unread_size
        self._unread_size = size
        if self._limits.has_too_much_unread:
            self.loop.call_soon(self._drop_slowest)  # this may be called in the middle of a write

    def _forget_unread(self) -> None:
        self._limits.unread -= self._unread_size
        self._unread_size = 0

    def _drop_slowest(self) -> None:
        """Drop those clients that have left most bytes unread for longest, until there is room for the others'."""
        while self._limits.has_too_much_unread:
            connections = cast("set[RelayProtocol]", self.connections)
            slowest = max(connections, key=lambda each: each._unread_size * (each._checks_paused + 1))
            self._limits.note_too_much_unread(slowest._unread_size)
            slowest._forget_unread()
            slowest.abort()

    def _check_head(self, nothing_came: bool) -> None:
        if not self._in_head and self.timeout_keep_alive_task is not None:
            return  # uvicorn closes a connection that waits for its next request, unless something has come of it
        self._checks_in_head += 1
        if self._checks_in_head <= self._limits.head_timeout_s:
            return
        if nothing_came or not self._in_head:
            self.transport.close()
        else:
            self._reject(HTTPStatus.REQUEST_TIMEOUT, "RequestTimeoutException", self._limits.slow_head)

    def on_body(self, body: bytes) -> None:
        """Count the bytes until the answer is complete: the request may be sent to another worker till then."""
        self._had_body = True
        self._parts += 1
        if self._parts > _MAX_PARTS + self._arrived // _SMALL_PART:
            self._refusal = (HTTPStatus.BAD_REQUEST, "BadRequestException", _TOO_MANY_PARTS)
            raise _RefusedError
        if not self.cycle.response_complete and not held_by(self.scope).add(len(body)):
            self._refuse_full()
        super().on_body(body)

    def on_response_complete(self) -> None:
        if self._answering is not None:
            _release(self._answering)
        super().on_response_complete()

    # --- what arrives ---

    def data_received(self, data: bytes) -> None:
        """Feed the parser. A request for an upgrade is served in HTTP/1.1, as RFC 9110 (section 7.8) allows."""
        if self._rejected:
            return
        self._unset_keepalive_if_required()
        self._checks_without_data = 0
        self._read_size = len(data)
        self._arrived += len(data)
        self._head_began = self._had_body = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._serve_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._reject(*(self._refusal or (HTTPStatus.BAD_REQUEST, "BadRequestException", _INVALID)))
            return
        if self._in_head:
            self._count_part_of_head(len(data))
        elif not self._head_began:
            self._count_framing(len(data))

    def _count_part_of_head(self, size: int) -> None:
        """Bound and count what has come of a head without an end. `_count_head` counts the whole exactly."""
        if not self._head_began:
            self._head_read += size
        if self._head_read > _MAX_HEAD:
            self._reject(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "BadRequestException", _TOO_LONG)
            return
        so_far = min(self._first_read + self._head_read, _MAX_HEAD)
        held = self._head_held
        if so_far > _SMALL_HEAD and held is not None and not held.add(_HEAD_COPIES * so_far - held.size):
            self._reject(HTTPStatus.SERVICE_UNAVAILABLE, "WlmException", held.full)

    def _count_framing(self, size: int) -> None:
        """Bound what comes between the chunks of a body and behind them, of which the parser reports nothing."""
        self._framing_size = 0 if self._had_body else self._framing_size + size
        if self._framing_size > _MAX_HEAD:
            self._reject(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "BadRequestException", _TOO_MUCH_FRAMING)

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
        """Keep the name as it is written, too: ASGI has names in lower case, users' code gets the client's.

        What follows a body in chunks (a trailer) is dropped: it must not change how the request was understood.
        """
        if not self._in_head:
            return
        self._names.append(name)
        if len(self._names) > _MAX_HEADERS:
            self._refusal = (HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "BadRequestException", _TOO_MANY_HEADERS)
            raise _RefusedError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        bound = self._first_read + self._head_read + (0 if self._head_began else self._read_size)
        if bound > _SMALL_HEAD:
            self._count_head(self._head_size())
        if not self.parser.get_http_version().startswith("1."):
            self._refusal = (HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "BadRequestException", _OTHER_VERSION)
            raise _RefusedError
        self._check_host()
        before = self.cycle
        if before is not None and not before.response_complete:
            self._count_waiting()
        super().on_headers_complete()
        if self.cycle is not before:  # else it is parsed again, without the upgrade
            self._head_held = None

    def _count_head(self, size: int) -> None:
        """Count a head that is not small like a body. Raises _RefusedError if it is too long, or there is no room."""
        if size > _MAX_HEAD:
            self._refusal = (HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "BadRequestException", _TOO_LONG)
            raise _RefusedError
        held, counted = held_by(self.scope), _HEAD_COPIES * size if size > _SMALL_HEAD else 0
        if not held.add(counted - held.size) and counted:
            self._refuse_full()

    def _count_waiting(self) -> None:
        """Count a request that waits for the answer to an earlier one. Raises _RefusedError, as `_count_head` does."""
        if len(self.pipeline) >= _MAX_WAITING:
            self._refusal = (HTTPStatus.SERVICE_UNAVAILABLE, "WlmException", _TOO_MANY_WAITING)
            raise _RefusedError
        if not held_by(self.scope).add(_WAITING_SIZE):
            self._refuse_full()

    def _release_head(self) -> None:
        """Count nothing of a head that has made no request."""
        if self._head_held is not None:
            self._head_held.release()
            self._head_held = None

    def _drop_head(self) -> None:
        """Keep nothing of a head that has made no request: the connection may linger, and nothing more is parsed."""
        if self._head_held is not None:
            self._release_head()
            self.url, self.headers, self._names = b"", [], []
            self.parser = self.scope = None  # type: ignore[assignment]

    def _refuse_full(self) -> None:
        self._refusal = (HTTPStatus.SERVICE_UNAVAILABLE, "WlmException", self._limits.bodies.full)
        raise _RefusedError

    def _check_host(self) -> None:
        known = False
        for name, value in self.headers:
            if name == b"host":
                if known or not _is_host(value):
                    self._refusal = (HTTPStatus.BAD_REQUEST, "BadRequestException", _WRONG_HOST)
                    raise _RefusedError
                known = True

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._head_began = True
        self._checks_in_head = self._framing_size = self._checks_in_body = self._arrived = self._parts = 0
        self._first_read, self._head_read = self._read_size, 0
        self._names = []
        self._release_head()
        self._head_held = HeldBytes(self._limits.bodies)
        extensions = {_EXTENSION: self, _NAMES: self._names, _HELD: self._head_held}
        self.scope["extensions"] = cast("dict[str, dict[object, object]]", extensions)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in (self._answering, self.cycle, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None:
                _release(cycle)
        self._release_head()
        self._forget_unread()
        _disconnect(self._answering)  # with pipelined requests it is not the last one, which alone uvicorn tells
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()
        # Otherwise the last request and its connection would refer to each other, and wait for a garbage collection.
        self.cycle = self._answering = self.scope = None  # type: ignore[assignment]
        self.pipeline.clear()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that has sent its request, and ends its side while it waits for the answer.

        A client that is gone ends its side, too. It cannot be told apart before something is sent to it, to which its
        system then answers with a reset. If nothing can be sent, its answer is given up, as it would be without this.
        """
        cycle, answering = self.cycle, self._answering
        waits = cycle is not None and not cycle.response_complete and not cycle.more_body and not self._rejected
        if not waits or answering is None or not self.transport.can_write_eof():
            return False
        if cycle.scope["http_version"] != "1.1":  # a client of HTTP/1.0 knows neither interim answers nor chunks
            return False
        if answering.response_started and not answering.chunked_encoding:
            return False
        cycle.keep_alive = False
        self._is_half_closed = True
        self.transport.write(_LEADING_ZERO if answering.response_started else _CONTINUE)
        self.loop.call_later(_PROBE_S, self._drop_if_reset)
        return True

    def _drop_if_reset(self) -> None:
        connection = self.transport.get_extra_info("socket")
        if not self.transport.is_closing() and _state(connection) == _TCP_CLOSE:
            self.abort()

    def shutdown(self) -> None:
        if self._checks_lingering is not None:
            self.transport.close()
        else:
            super().shutdown()

    # --- what is answered ---

    @property
    def waits_for_body(self) -> bool:
        """Return whether a request has begun whose body has not arrived as a whole."""
        return self._answering is not None and self._answering.more_body

    def refuse_unanswered(self, message: str) -> None:
        """Refuse the request whose answer has not begun, if there is one: the server ends."""
        cycle = self._answering
        if cycle is None or cycle.response_started or self.transport.is_closing() or self._checks_lingering is not None:
            return
        self._rejected = True
        _disconnect(cycle)
        self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "WlmException", message)
        self.loop.call_later(_LAST_LINGER_S, self.transport.close)

    def linger(self) -> None:
        """Have the next answer, which ends the connection, reach the client although it still sends its request."""
        cycle = self._answering
        if cycle is not None and cycle.more_body:  # else the client is gone
            cycle.transport = cast("asyncio.Transport", _Lingering(cycle.transport, self._close_after_reading))

    def _close_after_reading(self) -> None:
        """End this side, and read on until the client has ended its own.

        To close with bytes unread would reset the connection, and the client would lose an answer that it has not read.
        """
        self._rejected = True
        self._checks_lingering = 0
        if self.transport.can_write_eof():  # TLS has no such state
            self.transport.write_eof()
        self.flow.resume_reading()

    def write_whole(self, send: Send, status: int, head: bytes, body: bytes) -> bool:
        """Write a whole answer as uvicorn's `send` would from its two messages, in half the time; return whether it is.

        It is not if anything about the answer or its connection needs uvicorn. `head` has the lines behind those of
        uvicorn itself, checked, and the empty line.
        """
        cycle = self._answering
        if cycle is None or send != cycle.send or cycle.transport is not self.transport:
            return False  # the messages go through something first
        if cycle.response_started or cycle.disconnected or cycle.flow.write_paused or cycle.access_log:
            return False
        if not cycle.keep_alive or cycle.scope["method"] == "HEAD":
            return False
        standard = b"".join([b"%b: %b\r\n" % header for header in cycle.default_headers])
        self.transport.write(b"".join((STATUS_LINE[status], standard, head, body)))
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()
        cycle.on_response()
        return True

    def set_reason(self, phrase: str) -> None:
        """Set the reason phrase of the answer that comes next, for which ASGI has no field."""
        if self._answering is not None:  # else the client is gone
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
        self._drop_head()
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
        self._write_refusal(status, kind, message)
        self._close_after_reading()
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._limits.count_refusal(status)
        else:  # its task waits for the rest of the body, and counts the refusal
            self.refused_with = status
            _disconnect(cycle)

    def _write_refusal(self, status: HTTPStatus, kind: str, message: str) -> None:
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
        self.transport.write(b"%b%b\r\n%b" % (head, lines, body))


class _Lingering:
    """Stands in for the transport of an answer whose request has not ended, and closes it by `close`."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Flow(FlowControl):
    """uvicorn's flow control, without an exception for a connection that has just been closed."""

    def resume_reading(self) -> None:
        if self.read_paused and not self._transport.is_closing():
            super().resume_reading()


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


@functools.lru_cache(64)
def _is_host(value: bytes) -> bool:
    return _HOST.fullmatch(value) is not None


def _disconnect(cycle: RequestResponseCycle | None) -> None:
    """Tell the task of a request that nothing can be sent to the client any more."""
    if cycle is not None and not cycle.response_complete:
        cycle.disconnected = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()


def _state(connection: Any) -> int:
    """Return the state of a TCP connection, 0 if the system does not tell."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None or connection.family == socket.AF_UNIX:
        return 0
    return int(connection.getsockopt(socket.IPPROTO_TCP, option, 1)[0])


def _unacknowledged(connection: Any) -> int:
    """Return the bytes that the system holds for the other side, 0 if it does not tell."""
    if sys.platform != "linux":
        return 0
    answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def connection_of(scope: Any) -> RelayProtocol:
    """Return the connection of a request."""
    found: RelayProtocol = scope["extensions"][_EXTENSION]  # a cast would be a call, for every request
    return found


def held_by(scope: Any) -> HeldBytes:
    """Return what a request holds of the memory for bodies."""
    found: HeldBytes = scope["extensions"][_HELD]  # a cast would be a call, for every request
    return found


def keep_held(scope: Any) -> HeldBytes:
    """Return what a request holds, which the caller releases: it may be served after its connection has ended."""
    held = held_by(scope)
    held.is_kept = True
    return held


def _release(cycle: RequestResponseCycle) -> None:
    """Count the body of a request no more, unless the one that serves it does that."""
    held = held_by(cycle.scope)
    if not held.is_kept:
        held.release()


def detached_scope(
    scope: MutableMapping[str, Any], connection: object, held: HeldBytes | None = None
) -> MutableMapping[str, Any]:
    """Return the scope with `connection` in place of that of the client, which need not wait for the answer.

    `held` is what the request holds, if its body is not that of the scope.
    """
    extensions = {_EXTENSION: connection, _NAMES: header_names(scope), _HELD: held or held_by(scope)}
    return {**scope, "extensions": extensions}


def header_names(scope: Any) -> list[bytes]:
    """Return the names of a request's headers as the client wrote them."""
    names: list[bytes] = scope["extensions"][_NAMES]
    return names
