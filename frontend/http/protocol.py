"""uvicorn's HTTP protocol with what a relay needs and ASGI lacks: news of clients that go away, a way to drop one.

connection/arrival.py   bounds of what arrives: head, headers, chunks, requests that wait
connection/pace.py      clients that take too long
connection/unread.py    clients that do not read their answers
connection/answers.py   refusals, and what uvicorn's way of writing an answer lacks
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from frontend.http.clients import Send
from frontend.http.connection.answers import (
    LingeringTransport,
    PhrasingTransport,
    disconnect,
    refusal,
    without_chunks,
)
from frontend.http.connection.arrival import MAX_HEADERS, TOO_MANY_HEADERS, ArrivingRequest, Headers, RefusedError
from frontend.http.connection.pace import ClientPace
from frontend.http.connection.unread import UnreadBytes, drop_if_reset
from frontend.http.connection_limits import ConnectionLimits
from frontend.http.held_bytes import HeldBytes
from lmi_server.supervisor.job import ReplySlot

_EXTENSION = "lmi_server.connection"
_NAMES = "lmi_server.header_names"
_HELD = "lmi_server.held_bytes"
_WRITE_BUFFER = 64 * 1024  # bytes waiting for a client, from which on more is not written
_LAST_LINGER_S = 0.2  # for a client to send the rest of a request that was refused, when the server ends
_PROBE_S = 0.1
# What may be sent to a client before its answer goes on: an interim answer, or a zero in front of the size of a chunk.
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LEADING_ZERO = b"0"
_INVALID = RefusedError(HTTPStatus.BAD_REQUEST, "BadRequestException", "Invalid HTTP message.")
_OF_PROXY = frozenset({b"x-forwarded-for", b"x-forwarded-proto"})  # what uvicorn's middleware reads
# As uvicorn sets them, and HTTP/1.2 and later are served as HTTP/1.1 (RFC 9110, section 2.5).
_LENIENCIES = {"lenient_data_after_close": True, "lenient_version": True}


class RelayProtocol(HttpToolsProtocol):
    """One connection: what it gets from uvicorn and from the parser, and how it ends.

    `check` is called once a second, and ends connections that take too long. A client that only ends its own side still
    gets its answer.
    """

    def __init__(self, limits: ConnectionLimits, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.connection = ClientConnection(self)
        self.unread = UnreadBytes(limits)
        self.answering: RequestResponseCycle | None = None
        self._limits = limits
        self._arriving = ArrivingRequest(limits.bodies)
        self._pace = ClientPace(limits)
        self._is_half_closed = False  # the client has ended its side
        self._rejected = False  # what arrived is not HTTP; nothing that follows can be
        self.parser.set_dangerous_leniencies(**_LENIENCIES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        if self.scheme == "https":  # the default is 512 KiB, beside what the transport below TLS holds
            transport.set_write_buffer_limits(_WRITE_BUFFER)
        if len(self.connections) > self._limits.max_connections:
            self._limits.note_full()
            self._rejected = True
            self._limits.count_refusal(HTTPStatus.SERVICE_UNAVAILABLE)
            transport.write(refusal(HTTPStatus.SERVICE_UNAVAILABLE, "WlmException", self._limits.too_many))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in (self.answering, self.cycle, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None:
                _release(cycle)
        self._arriving.release_head()
        self.unread.forget()
        disconnect(self.answering)  # with pipelined requests it is not the last one, which alone uvicorn tells
        self.connection.note_gone()
        # Otherwise these and the connection would refer to each other, and wait for a garbage collection.
        self.cycle = self.answering = self.scope = self.connection = None  # type: ignore[assignment]
        self.pipeline.clear()

    def check(self) -> None:
        """Look once a second whether the client takes too long, or is gone without having said so."""
        pace, cycle = self._pace, self.cycle
        pace.without_data += 1
        if self.transport.is_closing():
            if pace.closes_too_slowly():
                self.transport.abort()
            return
        if self.flow.write_paused:
            too_slowly = self.unread.is_read_too_slowly(self.transport)
            _drop_slowest_soon(self._limits, self.loop, self.connections)
            if too_slowly:
                self.transport.abort()
                return
        try:
            if pace.lingers:
                if pace.has_lingered():
                    self.transport.close()
            elif cycle is None or cycle.response_complete:
                in_head = self._arriving.in_head
                # uvicorn closes a connection that waits for its next request, unless something has come of it
                if (in_head or self.timeout_keep_alive_task is None) and pace.is_idle_too_long(in_head):
                    self.transport.close()
            elif cycle.more_body:
                if not self.flow.read_paused:
                    pace.check_body(self._arriving.size)
            elif self._is_half_closed:
                drop_if_reset(self.transport)
        except RefusedError as refused:
            self._reject(refused)

    # --- what arrives ---

    def data_received(self, data: bytes) -> None:
        """Feed the parser. A request for an upgrade is served in HTTP/1.1, as RFC 9110 (section 7.8) allows."""
        if self._rejected:
            return
        self._unset_keepalive_if_required()
        self._pace.without_data = 0
        self._arriving.begin_read(len(data))
        try:
            self.parser.feed_data(data)
            self._arriving.end_read()
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":
                self._reject(_INVALID)
                return
            head = _without_upgrade(self.parser, self.url, self.headers)
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(**_LENIENCIES)
            self.data_received(head + data[upgrade.args[0] :])
        except httptools.HttpParserError as error:  # which has in its context what was raised through the parser
            self._reject(error.__context__ if isinstance(error.__context__, RefusedError) else _INVALID)
        except RefusedError as refused:
            self._reject(refused)

    def _should_upgrade(self) -> bool:
        """Keep uvicorn from answering a request for an upgrade, which is parsed again without it."""
        return True

    def on_message_begin(self) -> None:
        super().on_message_begin()
        arriving = self._arriving
        arriving.begin()
        self._pace.in_head = self._pace.in_body = 0
        extensions = {_EXTENSION: self.connection, _NAMES: arriving.names, _HELD: arriving.held}
        self.scope["extensions"] = cast("dict[str, dict[object, object]]", extensions)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep the name as it is written, too: ASGI has names in lower case, users' code gets the client's.

        What follows a body in chunks (a trailer) is dropped: it must not change how the request was understood.
        """
        arriving = self._arriving
        if arriving.in_head:
            arriving.names.append(name)
            if len(arriving.names) > MAX_HEADERS:
                raise RefusedError(*TOO_MANY_HEADERS)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        arriving, before = self._arriving, self.cycle
        arriving.end_head(self.url, self.headers, self.parser.get_http_version())
        if before is not None and not before.response_complete:
            arriving.count_waiting(len(self.pipeline))
        super().on_headers_complete()
        if self.cycle is not before:  # else it is parsed again, without the upgrade
            arriving.accept()

    def on_body(self, body: bytes) -> None:
        self._arriving.add_body(len(body), self.cycle.response_complete)
        super().on_body(body)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that has sent its request, and ends its side while it waits for the answer.

        A client that is gone ends its side, too. It cannot be told apart before something is sent to it, to which its
        system then answers with a reset. If nothing can be sent, its answer is given up, as it would be without this.
        """
        cycle, answering = self.cycle, self.answering
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
        self.loop.call_later(_PROBE_S, drop_if_reset, self.transport)
        return True

    # --- what is answered ---

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.answering = cycle
        if isinstance(app, ProxyHeadersMiddleware) and _OF_PROXY.isdisjoint(dict(cycle.scope["headers"])):
            app = app.app  # spares a coroutine: 2 % of the front end's instructions (benchmarks.instructions)
        super()._start_asgi_task(cycle, without_chunks(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def on_response_complete(self) -> None:
        if self.answering is not None:
            _release(self.answering)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread.pause(self.transport)
        _drop_slowest_soon(self._limits, self.loop, self.connections)

    def resume_writing(self) -> None:
        self.unread.resume()
        super().resume_writing()
        self.unread.forget()

    # --- how it ends ---

    def shutdown(self) -> None:
        if self._pace.lingers:
            self.transport.close()
        else:
            super().shutdown()

    def refuse_unanswered(self, message: str, only_unfinished: bool = False) -> None:
        """Refuse the request whose answer has not begun, if there is one: the server ends.

        `only_unfinished` refuses it only if its body has not arrived as a whole.
        """
        cycle = self.answering
        if cycle is None or cycle.response_started or self.transport.is_closing() or self._pace.lingers:
            return
        if only_unfinished and not cycle.more_body:
            return
        self._rejected = True
        disconnect(cycle)
        self._refuse(RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "WlmException", message))
        self.loop.call_later(_LAST_LINGER_S, self.transport.close)

    def _reject(self, refused: RefusedError) -> None:
        """Stop reading. Answer, unless the client could take that for (a part of) the answer to an earlier request."""
        self._rejected = True
        if self._arriving.release_head():  # the connection may linger, and nothing more is parsed
            self.url, self.headers, self._arriving.names = b"", [], []
            self.parser = self.scope = None  # type: ignore[assignment]
        cycle = self.cycle
        if self.transport.is_closing():
            return
        if cycle is None or cycle.response_complete:
            self._refuse(refused)
        elif cycle.response_started or (cycle.more_body and self.pipeline):
            self.transport.abort()
        elif cycle.more_body:  # the error is in the body of this very request
            self._refuse(refused)
        else:
            cycle.keep_alive = False  # an answer is on its way; the connection ends after it

    def _refuse(self, refused: RefusedError) -> None:
        self.transport.write(refusal(refused.status, refused.kind, refused.message))
        self.close_after_reading()
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._limits.count_refusal(refused.status)
        else:  # its task waits for the rest of the body, and counts the refusal
            self.connection.refused_with = refused.status
            disconnect(cycle)

    def close_after_reading(self) -> None:
        """End this side, and read on until the client has ended its own.

        To close with bytes unread would reset the connection, and the client would lose an answer that it has not read.
        """
        self._rejected = True
        self._pace.linger()
        if self.transport.can_write_eof():  # TLS has no such state
            self.transport.write_eof()
        self.flow.resume_reading()


class ClientConnection:
    """What the relay has of a connection.

    ASGI reports a disconnect only to a waiting task, which would cost a second task for each request. The
    callback of `watch` costs nothing. `refused_with` is the status that a request got while its body was read.
    """

    def __init__(self, protocol: RelayProtocol) -> None:
        self.refused_with: int | None = None
        self._protocol = protocol
        self._on_gone: Callable[[], None] | None = None

    def watch(self, on_gone: Callable[[], None], reply: ReplySlot) -> None:
        """Call `on_gone` once if the client goes away before `unwatch`; at once if it is gone already.

        What waits in `reply` counts as unread.
        """
        protocol = self._protocol
        protocol.unread.reply = reply
        if protocol.transport.is_closing():
            disconnect(protocol.answering)
            on_gone()
            return
        self._on_gone = on_gone
        protocol.flow.resume_reading()  # a long body may have paused it, and a paused transport sees no end of file

    def unwatch(self) -> None:
        self._on_gone = self._protocol.unread.reply = None

    def note_gone(self) -> None:
        """Tell the one who watches that the client is gone."""
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()

    def abort(self) -> None:
        """Drop the client and everything that it has not read."""
        transport = cast("asyncio.Transport | None", self._protocol.transport)
        if transport is not None:
            transport.abort()

    def linger(self) -> None:
        """Have the next answer, which ends the connection, reach the client although it still sends its request."""
        protocol, cycle = self._protocol, self._protocol.answering
        if cycle is not None and cycle.more_body:  # else the client is gone
            lingering = LingeringTransport(cycle.transport, protocol.close_after_reading)
            cycle.transport = cast("asyncio.Transport", lingering)

    def write_whole(self, send: Send, status: int, head: bytes, body: bytes) -> bool:
        """Write a whole answer as uvicorn's `send` would from its two messages, in half the time; return whether it is.

        It is not if anything about the answer or its connection needs uvicorn. `head` has the lines behind those of
        uvicorn itself, checked, and the empty line.
        """
        transport, cycle = self._protocol.transport, self._protocol.answering
        if cycle is None or send != cycle.send or cycle.transport is not transport:
            return False  # the messages go through something first
        if cycle.response_started or cycle.disconnected or cycle.flow.write_paused or cycle.access_log:
            return False
        if not cycle.keep_alive or cycle.scope["method"] == "HEAD":
            return False
        standard = b"".join([b"%b: %b\r\n" % header for header in cycle.default_headers])
        transport.write(b"".join((STATUS_LINE[status], standard, head, body)))
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()
        cycle.on_response()
        return True

    def set_reason(self, phrase: str) -> None:
        """Set the reason phrase of the next answer, for which ASGI has no field."""
        cycle = self._protocol.answering
        if cycle is not None:  # else the client is gone
            cycle.transport = cast("asyncio.Transport", PhrasingTransport(cycle, phrase))


class _Flow(FlowControl):
    """uvicorn's flow control, without an exception for a connection that has just been closed."""

    def resume_reading(self) -> None:
        if self.read_paused and not self._transport.is_closing():
            super().resume_reading()


def _without_upgrade(parser: httptools.HttpRequestParser, url: bytes, headers: Headers) -> bytes:
    """Return the head without the upgrade that it asks for."""
    head = [b"%b %b HTTP/%b\r\n" % (parser.get_method(), url, parser.get_http_version().encode())]
    head += [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
    return b"".join([*head, b"\r\n"])


def _drop_slowest_soon(limits: ConnectionLimits, loop: asyncio.AbstractEventLoop, connections: Any) -> None:
    if limits.has_too_much_unread:  # this may be called in the middle of a write
        loop.call_soon(_drop_slowest, limits, connections)


def _drop_slowest(limits: ConnectionLimits, connections: Any) -> None:
    """Drop the clients with the most bytes unread for longest, until there is room for the others'."""
    while limits.has_too_much_unread:
        slowest = max(cast("set[RelayProtocol]", connections), key=lambda each: each.unread.weight)
        limits.note_too_much_unread(slowest.unread.size)
        slowest.unread.forget()
        slowest.transport.abort()


def connection_of(scope: Any) -> ClientConnection:
    """Return the connection of a request."""
    found: ClientConnection = scope["extensions"][_EXTENSION]  # a cast would be a call, for every request
    return found


def held_by(scope: Any) -> HeldBytes:
    """Return what a request holds of the memory for bodies."""
    found: HeldBytes = scope["extensions"][_HELD]  # a cast would be a call, for every request
    return found


def keep_held(scope: Any) -> HeldBytes:
    """Return a request's held bytes, for the caller to release: it may be served after its connection has ended."""
    held = held_by(scope)
    held.is_kept = True
    return held


def _release(cycle: RequestResponseCycle) -> None:
    """Count the body of a request no more, unless its server does that."""
    held = held_by(cycle.scope)
    if not held.is_kept:
        held.release()


def scope_without_client(
    path: str, headers: list[tuple[bytes, bytes]], connection: object, held: HeldBytes
) -> MutableMapping[str, Any]:
    """Return the scope of a POST that this server sends itself; `held` are the bytes of its body."""
    extensions = {_EXTENSION: connection, _NAMES: [name for name, _ in headers], _HELD: held}
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
        "extensions": extensions,
    }


def detached_scope(
    scope: MutableMapping[str, Any], connection: object, held: HeldBytes | None = None
) -> MutableMapping[str, Any]:
    """Return the scope with `connection` in place of the client's, which need not wait for the answer.

    `held` are the bytes of the request, if its body is not the scope's.
    """
    extensions = {_EXTENSION: connection, _NAMES: header_names(scope), _HELD: held or held_by(scope)}
    return {**scope, "extensions": extensions}


def header_names(scope: Any) -> list[bytes]:
    """Return the names of a request's headers as the client wrote them."""
    names: list[bytes] = scope["extensions"][_NAMES]
    return names
