"""The HTTP/1.1 client of the load generator: one request at a time on each connection, and a time for each read.

General clients for HTTP take most of a core for 1,000 requests per second. This one does no more than
a load needs, on asyncio's protocols and the parser of httptools, and takes a tenth of the time.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import httptools
import msgspec

from lmi_server.bench.dialects import Dialect
from lmi_server.bench.records import Record
from lmi_server.bench.workload import Prompt
from lmi_server.client.server_calls import address
from lmi_server.contract.texts.sendable import json_bytes

_ERROR_TEXT = 300  # characters of an error that are kept


@dataclass(frozen=True)
class Target:
    """Where requests go, and what all of them have in common."""

    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None
    headers: tuple[tuple[str, str], ...]
    model: str
    dialect: Dialect
    stream: bool

    @property
    def url(self) -> str:
        """Return the URL before the path of the API."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"

    def at(self, url: str) -> Target:
        """Return the same on another server."""
        host, port, prefix, tls = address(url)
        return replace(self, host=host, port=port, prefix=prefix, tls=tls)

    def request(self, prompt: Prompt) -> bytes:
        """Return the bytes of a request."""
        body = json_bytes(self.dialect.body(prompt, self.model, self.stream))
        head = [f"POST {self.prefix}{self.dialect.path} HTTP/1.1", f"host: {self.host}:{self.port}"]
        head += ["content-type: application/json", f"content-length: {len(body)}"]
        head += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join([*head, "", ""]).encode("latin-1") + body


class LoadConnection(asyncio.Protocol):
    """A connection that is kept. `on_free` is called after each answer, `on_lost` when the server has closed it."""

    def __init__(
        self, target: Target, on_free: Callable[[LoadConnection], None], on_lost: Callable[[LoadConnection], None]
    ) -> None:
        self._target = target
        self._on_free = on_free
        self._on_lost = on_lost
        self._transport: asyncio.WriteTransport | None = None
        self._record: Record | None = None
        self._on_end: Callable[[Record], None] | None = None
        self._parser: Any = None
        self._body: list[bytes] = []
        self._line = b""  # the start of a line of a stream whose end has not come
        self._last = 0.0  # time of the last event with tokens
        self._exchanges = 0
        self._has_received = False  # anything of this answer

    # --- one exchange ---

    def send(self, request: bytes, record: Record, on_end: Callable[[Record], None]) -> None:
        """Send a request; `on_end` gets its record when it has ended, however it ends."""
        self._record, self._on_end = record, on_end
        self._body.clear()
        self._line = b""
        self._exchanges += 1
        self._has_received = False
        self._parser = httptools.HttpResponseParser(self)
        record.sent = time.perf_counter()
        if self._transport is None or not self.is_open:
            self._end("the connection is closed")
            return
        self._transport.write(request)

    def abandon(self, error: str) -> None:
        """End the exchange, because it takes too long; the server sees its client go."""
        if self._record is not None:
            self._end(error)
        self.close()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def was_stale(self) -> bool:
        """Return whether a connection that was kept broke before any of the answer: the server had given it up."""
        return not self.is_open and self._exchanges > 1 and not self._has_received

    def text(self) -> str:
        """Return the text of the answer that has just ended well."""
        return self._target.dialect.text(b"".join(self._body), self._target.stream)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self, error: str | None) -> None:
        record, on_end = self._record, self._on_end
        assert record is not None
        assert on_end is not None
        self._record = self._on_end = None
        record.end = time.perf_counter()
        record.error = error
        on_end(record)

    # --- of asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._record is not None:
            self._end(f"the connection broke{f': {exc}' if exc else ''}")
        self._on_lost(self)

    def data_received(self, data: bytes) -> None:
        if self._record is None:
            return
        self._has_received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abandon(f"the answer is not HTTP: {error}")

    # --- of the parser ---

    def on_body(self, body: bytes) -> None:
        record = self._record
        if record is None:
            return
        self._body.append(body)
        if not self._target.stream:
            return
        whole, newline, rest = body.rpartition(b"\n")
        if not newline:
            self._line += body
            return
        events = self._target.dialect.count(self._line + whole if self._line else whole)
        self._line = rest
        if events:
            self._note(record, events)

    def _note(self, record: Record, events: int) -> None:
        """Note the time of a read that had `events` events with tokens: all but the first came at once."""
        now = time.perf_counter()
        if record.first is None:
            record.first = now
        else:
            record.gaps.append(now - self._last)
        record.gaps.extend([0.0] * (events - 1))
        record.events += events
        self._last = now

    def on_message_complete(self) -> None:
        record = self._record
        if record is None:
            return
        record.status = self._parser.get_status_code()
        stays = self._parser.should_keep_alive()
        self._end(self._failure(record, b"".join(self._body)))
        if stays:
            self._on_free(self)
        else:
            self.close()

    def _failure(self, record: Record, answer: bytes) -> str | None:
        """Read the answer; return what is wrong with it, or None."""
        if record.status != 200:
            return f"{record.status}: {_message(answer)}"
        try:
            record.usage = self._target.dialect.usage(answer, self._target.stream)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"the answer has an error: {str(error)[:_ERROR_TEXT]}"
        return None


def _message(answer: bytes) -> str:
    """Return the message of an error in the form of LMI, OpenAI or TGI; otherwise the start of the answer."""
    try:
        value = msgspec.json.decode(answer)
        error = value.get("error", value)
        return str(error if isinstance(error, str) else error["message"])[:_ERROR_TEXT]
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError):
        return answer[:_ERROR_TEXT].decode("utf-8", "replace").strip()
