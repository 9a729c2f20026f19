"""One request at a server: what is sent, and what its answer becomes for the dispatcher.

Until the first byte of a request is written, it may go to another server. From then on the server may have begun it,
and whatever happens ends it here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from lmi_server.contract.errors import UpstreamError
from lmi_server.contract.protocol import CANCELLED, Chunk, End, Error, Head, Item, Reply, Summary
from lmi_server.route.connection import Connection, Headers
from lmi_server.route.headers import answer_headers

_WHOLE = 1 << 20  # bytes of an answer that is kept until it is whole; a longer one is passed on as it comes
_FAILED = 400
_EVENTS = "text/event-stream"
_TAIL = 8192  # bytes at the end of an answer that are searched
_EVENT = b"data:"
_BYTES_PER_TOKEN = 4  # of English prose, roughly
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,12})\b')
_OUTPUT = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d{1,12})\b')
_LENGTH = re.compile(rb'"(?:finish_reason|stop_reason)"\s*:\s*"(?:length|max_tokens)"')
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,12})\b')


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


class UsageMeter:
    """Finds the tokens of a request in its answer as it passes; estimates them by `prompt_bytes` if it says nothing.

    The answer is not parsed: the last field of that name counts. In the texts of an answer quotes are escaped, so that
    no text looks like a field.
    """

    def __init__(self, prompt_bytes: int) -> None:
        self._prompt_bytes = prompt_bytes
        self._tail = b""
        self._events = 0

    def add(self, data: bytes) -> None:
        self._events += data.count(_EVENT)
        self._tail = data[-_TAIL:] if len(data) >= _TAIL else (self._tail + data)[-_TAIL:]

    def summary(self) -> Summary | None:
        """Return what the answer says, None if it says nothing."""
        prompt, output = _last(_PROMPT.findall(self._tail)), _last(_OUTPUT.findall(self._tail))
        if prompt is None and output is None:
            return None
        cached = _last(_CACHED.findall(self._tail)) or 0
        ended = "length" if _LENGTH.search(self._tail) else "eos_token"  # the names of LMI
        return Summary(ended, prompt or 0, output or 0, min(cached, prompt or 0), 1, None, 0.0, 0.0)

    def tokens(self, summary: Summary | None, failed: bool) -> int:
        """Return the tokens that the request counts for: estimated by events and bytes without a `summary`."""
        if summary is not None:
            return summary.prompt_tokens + summary.output_tokens
        return 0 if failed else self._prompt_bytes // _BYTES_PER_TOKEN + self._events


def _last(found: Sequence[bytes]) -> int | None:
    return int(found[-1]) if found else None
