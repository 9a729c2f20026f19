"""One request at a server: what is sent, and what its answer becomes for the dispatcher.

Until the first byte of a request is written, it may go to another server. From then on the server may have begun it,
and whatever happens ends it here.
"""

from __future__ import annotations

from collections.abc import Callable

from lmi_server.contract.errors import UpstreamError
from lmi_server.contract.protocol import CANCELLED, Chunk, End, Error, Head, Item, Reply
from lmi_server.route.connection import Connection, Headers
from lmi_server.route.headers import answer_headers
from lmi_server.route.usage import UsageMeter

_WHOLE = 1 << 20  # bytes of an answer that is kept until it is whole; a longer one is passed on as it comes
_FAILED = 400
_EVENTS = "text/event-stream"


class RoutedExchange:
    """The answer to the request of number `id`. `emit` gets its items; nothing follows the terminal one.

    `on_usage` gets the tokens that the request took, as far as that is known.
    """

    def __init__(
        self, number: int, prompt_bytes: int, emit: Callable[[Item], None], on_usage: Callable[[int], None]
    ) -> None:
        self.id = number
        self.connection: Connection | None = None
        self._emit = emit
        self._on_usage = on_usage
        self._meter = UsageMeter(prompt_bytes)
        self._status = 0
        self._headers: list[tuple[str, str]] = []
        self._parts: list[bytes] | None = None  # of an answer that is kept until it is whole
        self._is_done = False

    def cancel(self) -> None:
        """Close the connection, which tells the server to stop; end with the kind "Cancelled"."""
        self._count(failed=self._status == 0)
        self._end(Error(self.id, CANCELLED, "the client went away"))

    def fail(self, reason: str) -> None:
        """End a request that the server may have begun."""
        self._count(failed=self._status == 0)
        self._end(Error(self.id, UpstreamError.__name__, f"The server that had the request {reason}"))

    def give_back(self, item: Error) -> None:
        """End a request that the server has not seen."""
        self._end(item)

    # --- the connection's side ---

    def on_head(self, status: int, headers: Headers, length: int | None) -> None:
        self._status = status
        self._headers = answer_headers(headers)
        content_type = next((value for name, value in self._headers if name == "content-type"), "")
        if length is not None and length <= _WHOLE and not content_type.startswith(_EVENTS):
            self._parts = []
        else:
            self._emit(Head(self.id, status, self._headers))

    def on_body(self, data: bytes) -> None:
        self._meter.add(data)
        if self._parts is not None:
            self._parts.append(data)
        else:
            self._emit(Chunk(self.id, data))

    def on_end(self) -> None:
        self.connection = None  # it serves others already
        failed = self._status >= _FAILED
        summary = None if failed else self._meter.summary()
        self._on_usage(self._meter.tokens(summary, failed))
        if self._parts is None:
            self._end(End(self.id, self._status, summary=summary))
        else:
            self._end(Reply(self.id, self._status, self._headers, b"".join(self._parts), summary=summary))

    def on_break(self, reason: str) -> None:
        self.connection = None
        self.fail(reason)

    def _count(self, failed: bool) -> None:
        if not self._is_done:
            self._on_usage(self._meter.tokens(None, failed))

    def _end(self, item: Reply | End | Error) -> None:
        if self._is_done:
            return
        self._is_done = True
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()
        self._parts = None
        self._emit(item)
