"""Which requests are traced. OpenTelemetry is imported only if `otlp_traces_endpoint` asks for traces."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from importlib import import_module
from typing import TYPE_CHECKING

from frontend.http.clients import Scope
from frontend.observability.request_record import RequestRecord
from frontend.observability.trace_context import RequestTrace, parse_traceparent
from frontend.observability.traces.settings import TraceSettings
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import ConfigurationError

if TYPE_CHECKING:
    from frontend.observability.traces.spans import OpenTelemetrySpans

logger = logging.getLogger(__name__)

_CLOSE_LIMIT_S = 5.0


class Tracing:
    """Begins the traces of requests: as the client's trace says, otherwise for the share `ratio` of them.

    The relay draws that share itself: the other requests cost no call.
    """

    def __init__(self, ratio: float, spans: OpenTelemetrySpans) -> None:
        self.ratio = ratio
        self._spans = spans

    @classmethod
    def from_settings(cls, settings: ServerSettings) -> Tracing | None:
        """Return the traces that the settings ask for, None for none. Raises ConfigurationError."""
        asked = settings.part(TraceSettings)
        endpoint = asked.otlp_traces_endpoint
        if endpoint is None:
            return None
        try:
            spans = import_module("frontend.observability.traces.spans").OpenTelemetrySpans(endpoint)
        except ImportError as error:
            raise ConfigurationError(
                f'otlp_traces_endpoint = "{endpoint}" needs OpenTelemetry ({error}); run: pip install lmi-server[otel]'
            ) from error
        except ValueError as error:  # such as a queue that is shorter than a message
            raise ConfigurationError(
                f'otlp_traces_endpoint = "{endpoint}" cannot be used: {error}; check the variables OTEL_*'
            ) from error
        if spans.is_disabled:
            logger.warning("otlp_traces_endpoint has no effect, because OTEL_SDK_DISABLED=true")
            return None
        return cls(asked.trace_sample, spans)

    def begin(self, properties: dict[str, str], scope: Scope) -> RequestTrace | None:
        """Return the span of a request that was drawn, or whose headers name a trace; None if that is not to be traced.

        The header traceparent is the new span's from now on: later code adds to the same trace.
        """
        header = properties.get("traceparent")
        parent = None if header is None else parse_traceparent(header)
        if parent is not None:
            if not parent.is_sampled:
                return None
        elif header is not None and random.random() >= self.ratio:  # not drawn yet: it could have been valid
            return None
        try:
            trace = self._spans.begin(properties, scope)
        except Exception:  # as in `end`
            logger.exception("the span of a request cannot be begun")
            return None
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
