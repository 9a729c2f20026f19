"""Which requests are traced. OpenTelemetry is imported only if `otlp_traces_endpoint` asks for traces."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import threading
from importlib import import_module
from typing import NamedTuple, Protocol

from frontend.http.clients import Scope
from frontend.observability.request_record import RequestRecord
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import ConfigurationError

logger = logging.getLogger(__name__)

_CLOSE_LIMIT_S = 5.0
# W3C's Trace Context.
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


class TraceContext(NamedTuple):
    """A trace and the span in it that sent the request, both in hexadecimal digits."""

    trace_id: str
    span_id: str
    is_sampled: bool


class RequestTrace(Protocol):
    """The span of one request, and those of its phases. `spans.py` has the one for OpenTelemetry."""

    trace_id: str
    """In hexadecimal digits."""

    header: str
    """The header traceparent of whatever this request causes."""

    def end(self, record: RequestRecord) -> None:
        """Send the spans of the request, which has ended, soon."""


class Spans(Protocol):
    """Begins the spans of requests, and sends those that have ended."""

    def begin(self, properties: dict[str, str], scope: Scope, arrived: float) -> RequestTrace:
        """Begin the span of a request with these headers: in the trace that they name, otherwise in a new one."""

    def close(self) -> None:
        """Send what waits; this may take a while."""


class Tracing:
    """Begins the traces of requests: as the client's trace says, otherwise for the share `ratio` of them.

    The relay draws that share itself, so that the other requests cost no call.
    """

    def __init__(self, ratio: float, spans: Spans) -> None:
        self.ratio = ratio
        self._spans = spans

    @classmethod
    def from_settings(cls, settings: ServerSettings) -> Tracing | None:
        """Return the traces that the settings ask for, None for none. Raises ConfigurationError."""
        endpoint = settings.otlp_traces_endpoint
        if endpoint is None:
            return None
        try:
            spans: Spans = import_module("frontend.observability.spans").OpenTelemetrySpans(endpoint)
        except ImportError as error:
            raise ConfigurationError(
                f'otlp_traces_endpoint = "{endpoint}" needs OpenTelemetry ({error}); run: pip install lmi-server[otel]'
            ) from error
        return cls(settings.trace_sample, spans)

    def begin(self, properties: dict[str, str], scope: Scope, arrived: float) -> RequestTrace | None:
        """Return the span of a request that was drawn, or whose headers name a trace; None if that is not to be traced.

        The header traceparent is that of the new span from now on, so that code behind it adds to the same trace.
        """
        header = properties.get("traceparent")
        parent = None if header is None else parse_traceparent(header)
        if parent is not None:
            if not parent.is_sampled:
                return None
        elif header is not None and random.random() >= self.ratio:  # not drawn yet: it could have been valid
            return None
        trace = self._spans.begin(properties, scope, arrived)
        properties["traceparent"] = trace.header
        return trace

    def end(self, trace: RequestTrace, record: RequestRecord) -> None:
        """Send the spans of a request that has ended, soon."""
        try:
            trace.end(record)
        except Exception:  # a request without spans is better than a server that no longer answers
            logger.exception("the spans of trace %s cannot be made", trace.trace_id)

    async def close(self) -> None:
        """Send what waits, for at most a few seconds: the collector may be gone."""
        closing = threading.Thread(target=self._spans.close, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, _CLOSE_LIMIT_S)


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
