"""Which requests are traced. OpenTelemetry is imported only if `otlp_traces_endpoint` asks for traces."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from importlib import import_module
from typing import Any, Protocol

import msgspec

from frontend.http.clients import Scope
from frontend.observability.request_record import EndedRequest, RequestRecord
from frontend.observability.trace_context import HttpRequest, RequestTrace, parse_traceparent
from frontend.observability.traces.settings import TraceSettings
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import ConfigurationError

logger = logging.getLogger(__name__)

_FLUSH_S = 5.0
_TOGETHER, _DELAY_S = 16, 0.2
_LONGEST = 256  # characters of a text from the client


class SpanWriter(Protocol):
    """Makes spans of a request and sends them; `spans.py` has the one for OpenTelemetry."""

    def write(self, request: EndedRequest, trace: RequestTrace) -> None:
        """Send the spans of a request that has ended, soon."""

    def close(self) -> None:
        """Send what waits; this may take a while."""


class Tracing:
    """Begins the traces of requests: as the client's trace says, otherwise for the share `ratio` of them.

    The relay draws that share itself, so that the other requests cost no call.
    """

    def __init__(self, ratio: float, spans: SpanWriter) -> None:
        self.ratio = ratio
        self._spans = spans
        self._ended: list[tuple[RequestTrace, RequestRecord, tuple[Any, ...]]] = []  # whose spans are to be made
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, settings: ServerSettings) -> Tracing | None:
        """Return the traces that the settings ask for, None for none. Raises ConfigurationError."""
        asked = settings.part(TraceSettings)
        endpoint = asked.otlp_traces_endpoint
        if endpoint is None:
            return None
        try:
            spans: SpanWriter = import_module("frontend.observability.traces.spans").OpenTelemetrySpans(endpoint)
        except ImportError as error:
            raise ConfigurationError(
                f'otlp_traces_endpoint = "{endpoint}" needs OpenTelemetry ({error}); run: pip install lmi-server[otel]'
            ) from error
        return cls(asked.trace_sample, spans)

    def begin(self, properties: dict[str, str], scope: Scope) -> RequestTrace | None:
        """Return the span of a request that was drawn, or whose headers name a trace; None if that is not to be traced.

        The header traceparent is that of the new span from now on, so that code behind it adds to the same trace.
        """
        header = properties.get("traceparent")
        parent = None if header is None else parse_traceparent(header)
        if parent is None:
            if header is not None and random.random() >= self.ratio:  # not drawn yet: it could have been valid
                return None
            trace = RequestTrace(_random_id(128), _random_id(64), _http(properties, scope))
        elif parent.is_sampled:
            state = properties.get("tracestate", "")
            trace = RequestTrace(parent.trace_id, _random_id(64), _http(properties, scope), parent.span_id, state)
        else:
            return None
        properties["traceparent"] = trace.header
        return trace

    def add(self, trace: RequestTrace, record: RequestRecord, shown: tuple[Any, ...]) -> None:
        """Send the spans of a request that has ended, soon; `shown` is what EndedRequest adds to a record.

        Those of several are made together: one by one they take a multiple of the time.
        """
        self._ended.append((trace, record, shown))
        if len(self._ended) == 1:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self.hand_over)
        elif len(self._ended) >= _TOGETHER:
            self.hand_over()

    def hand_over(self) -> None:
        """Make the spans that wait, and give them to the SDK."""
        if self._timer is not None:
            self._timer.cancel()
        ended, self._ended = self._ended, []
        for trace, record, shown in ended:
            try:
                self._spans.write(EndedRequest(*msgspec.structs.astuple(record), *shown), trace)
            except Exception:  # a request without spans is better than a server that no longer answers
                logger.exception("the spans of trace %s cannot be made", trace.trace_id)

    async def close(self) -> None:
        """Send what waits, for at most a few seconds: the collector may be gone."""
        self.hand_over()
        closing = threading.Thread(target=self._spans.close, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, _FLUSH_S)


def _http(properties: dict[str, str], scope: Scope) -> HttpRequest:
    return HttpRequest(
        scope["method"],
        scope["scheme"],
        scope["path"][:_LONGEST],
        scope["http_version"],
        scope["server"],
        properties.get("user-agent", "")[:_LONGEST],
    )


def _random_id(bits: int) -> str:
    return f"{random.getrandbits(bits) or 1:0{bits // 4}x}"
