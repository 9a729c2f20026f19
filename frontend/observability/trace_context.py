"""W3C's Trace Context: which trace a request belongs to, as its header traceparent says; and what traces requests."""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from frontend.http.clients import Scope
from frontend.observability.request_record import RequestRecord

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


class TraceContext(NamedTuple):
    """A trace and the span in it that sent the request, both in hexadecimal digits."""

    trace_id: str
    span_id: str
    is_sampled: bool


class RequestTrace(Protocol):
    """The span of one request, and those of its phases. `traces/spans.py` has the one for OpenTelemetry."""

    trace_id: str
    """In hexadecimal digits."""

    header: str
    """The header traceparent of whatever this request causes."""

    def end(self, record: RequestRecord) -> None:
        """Send the spans of the request, which has ended, soon."""


class Tracer(Protocol):
    """What begins the traces of requests, and ends them: Tracing, if the settings ask for traces.

    `ratio` is the share of the requests without a trace of their own that are traced.
    """

    ratio: float

    def begin(self, properties: dict[str, str], scope: Scope) -> RequestTrace | None:
        """Return the span of a request that was drawn, or whose headers name a trace; None if it is not traced."""

    def end(self, trace: RequestTrace, record: RequestRecord) -> None:
        """Send the spans of a request that has ended, soon."""

    async def close(self) -> None:
        """Send what waits."""


def parse_traceparent(header: str) -> TraceContext | None:
    """Return what a header says, None if it is not valid. A later version may have more fields behind the flags."""
    match = _TRACEPARENT.fullmatch(header)
    if match is None or (match[1] == "00" and match[5] is not None):
        return None
    return TraceContext(match[2], match[3], bool(int(match[4], 16) & _SAMPLED))


def trace_id_in(header: str) -> str:
    """Return the id of the trace that a header names, "" if the header is not valid."""
    context = parse_traceparent(header)
    return "" if context is None else context.trace_id
