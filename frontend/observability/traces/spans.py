"""The spans of a request, sent with OpenTelemetry's SDK. Only `tracing.py` imports this.

    chat demo                            arrival to the last byte, by the conventions for generative AI and HTTP; POST
                                         /invocations if nothing was generated
      receive                            the request is read and given to the queue
      queue                              it waits for a worker
      attempt                            a worker had it and lost it; it waits again (a second `queue`)
      prefill, decode                    the worker's start to the first token, and to the last one
      format                             the rest of the answer is written and sent
      execute                            instead of these three, if nothing is known of tokens

All spans are made when the request has ended: their times are known then. They are made as plain data. The SDK's tracer
measures the times itself, with a lock and copies for each span, and would take several times as long.
"""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    format_span_id,
    format_trace_id,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from frontend.http.clients import Scope
from frontend.observability.request_record import CLIENT_GONE, FAILED, RequestRecord
from lmi_server.dialects import routes
from lmi_server.dialects.optional import optional_dialects

_NAME = "lmi-server"
_PROPAGATOR = TraceContextTextMapPropagator()
logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)  # its warnings quote what clients send
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
_LONGEST = 256  # characters of a text from the client
_CHAT, _TEXT = "chat", "text_completion"
# gen_ai.operation.name by route; other routes have one if text was generated.
_OPERATIONS = {
    **dict.fromkeys((routes.CHAT_COMPLETIONS, routes.RESPONSES, *optional_dialects().chats), _CHAT),
    routes.COMPLETIONS: _TEXT,
    routes.EMBEDDINGS: "embeddings",
}


class OpenTelemetrySpans:
    """Begins the spans of requests, and has a thread of the SDK send them to a collector at `endpoint`.

    The SDK reads its own variables, such as OTEL_SERVICE_NAME and OTEL_EXPORTER_OTLP_HEADERS.
    """

    def __init__(self, endpoint: str) -> None:
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: _NAME}))
        source = {
            "resource": _Source(resource.attributes, resource.schema_url),
            "instrumentation_scope": InstrumentationScope(_NAME, version(_NAME)),
        }
        self._make = functools.partial(ReadableSpan, **source)
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint))

    def begin(self, properties: dict[str, str], scope: Scope) -> RequestSpans:
        """Begin the span of a request with these headers: in the trace that they name, otherwise in a new one."""
        return RequestSpans(self, properties, scope)

    def add(self, phase: _Phase, context: SpanContext, parent: SpanContext | None, offset: float, **more: Any) -> None:
        """Send a span, soon. `offset` is what time.time() is ahead of time.monotonic()."""
        times = {"start_time": int((phase.began + offset) * 1e9), "end_time": int((phase.ended + offset) * 1e9)}
        status = _ERROR if phase.failed else _UNSET
        self._processor.on_end(self._make(phase.name, context, parent, status=status, **times, **more))

    def close(self) -> None:
        """Send what waits."""
        self._processor.shutdown()


class _Source(Resource):  # type: ignore[misc]  # mypy skips OpenTelemetry
    """The resource of all spans. The exporter looks it up for each span, and the SDK's own hash writes it as JSON."""

    def __hash__(self) -> int:
        return id(self)


class RequestSpans:
    """The span of one request, and those of its phases."""

    def __init__(self, spans: OpenTelemetrySpans, properties: dict[str, str], scope: Scope) -> None:
        self._spans = spans
        self._attributes = _http_attributes(properties, scope)
        parent = get_current_span(_PROPAGATOR.extract(properties)).get_span_context()
        self._parent = parent if parent.is_valid else None
        self._context = _context(parent.trace_id or random.getrandbits(128), parent.trace_state)
        self.trace_id = format_trace_id(self._context.trace_id)
        self.header = f"00-{self.trace_id}-{format_span_id(self._context.span_id)}-01"

    def end(self, record: RequestRecord) -> None:
        """Send the spans, soon."""
        own, http = self._context, self._attributes
        operation = _OPERATIONS.get(record.route, "" if record.summary is None else _TEXT)
        name = f"{operation} {record.model}" if operation else f"{http['http.request.method']} {http['http.route']}"
        failed = record.code >= FAILED and record.code != CLIENT_GONE
        attributes = http | _attributes(record, operation)
        offset = time.time() - time.monotonic()
        whole = _Phase(name.strip(), record.arrived, record.ended, failed)
        self._spans.add(whole, own, self._parent, offset, kind=SpanKind.SERVER, attributes=attributes)
        for phase in _phases(record):
            self._spans.add(phase, _context(own.trace_id, own.trace_state), own, offset)


def _context(trace_id: int, state: TraceState) -> SpanContext:
    """Return a new span of a trace."""
    return SpanContext(trace_id, random.getrandbits(64) or 1, False, _SAMPLED, state)


class _Phase(NamedTuple):
    name: str
    began: float
    ended: float
    failed: bool = False


def _phases(record: RequestRecord) -> Iterator[_Phase]:
    if not record.queued:  # it was refused
        yield _Phase("receive", record.arrived, record.ended)
        return
    yield _Phase("receive", record.arrived, record.queued)
    waits = record.queued
    for sent, lost in record.attempts:
        yield _Phase("queue", waits, sent)
        yield _Phase("attempt", sent, lost, failed=True)
        waits = lost
    yield _Phase("queue", waits, record.sent)
    summary = record.summary
    if summary is None or summary.prefill_s is None:
        yield _Phase("execute", record.sent, record.ended)
        return
    first, last = record.sent + summary.prefill_s, record.sent + summary.generate_s
    yield _Phase("prefill", record.sent, first)
    yield _Phase("decode", first, last)
    yield _Phase("format", last, max(last, record.ended))


def _attributes(record: RequestRecord, operation: str) -> dict[str, Any]:
    """Return the end of a request by the semantic conventions, and the server's own attributes."""
    attributes: dict[str, Any] = {
        "http.response.status_code": record.code,
        "lmi.request.id": record.id,
        "lmi.route": record.route,
    }
    if record.client:
        attributes["client.address"] = record.client
    if record.code >= 400:
        attributes["error.type"] = record.error or str(record.code)
    if operation:
        attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": _NAME}
        if record.model:
            attributes |= {"gen_ai.request.model": record.model, "gen_ai.response.model": record.model}
    summary = record.summary
    if summary is not None:
        attributes |= {
            "gen_ai.usage.input_tokens": summary.prompt_tokens,
            "gen_ai.usage.output_tokens": summary.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": summary.cached_tokens,
            "gen_ai.response.finish_reasons": (summary.finish_reason,),
        }
        if summary.adapter:
            attributes["lmi.adapter"] = summary.adapter
        if (first_token_s := record.first_token_s) is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = first_token_s
    return attributes


def _http_attributes(properties: dict[str, str], scope: Scope) -> dict[str, Any]:
    path = scope["path"][:_LONGEST]
    attributes = {
        "http.request.method": scope["method"],
        "http.route": http_route(path),
        "url.path": path,
        "url.scheme": scope["scheme"],
        "network.protocol.name": "http",
        "network.protocol.version": scope["http_version"],
    }
    if scope["server"] is not None:
        address, port = scope["server"]  # of a Unix socket its path and None
        attributes["server.address"] = address
        if port is not None:
            attributes["server.port"] = port
    if properties.get("user-agent"):
        attributes["user_agent.original"] = properties["user-agent"][:_LONGEST]
    return attributes


def http_route(path: str) -> str:
    """Return a path of inference with {model} and {version} in place of names: a collector keeps a series for each."""
    parts = path.split("/")
    match parts[1:]:
        case ["predictions", _, *rest]:
            return "/predictions/{model}" + "/{version}" * bool(rest)
        case ["models", _, *rest, "invoke"]:
            return "/models/{model}" + "/{version}" * bool(rest) + "/invoke"
        case ["v2", "models", _, "versions", _, *rest]:
            return "/".join(["/v2/models/{model}/versions/{version}", *rest])
        case ["v2", "models", _, *rest]:
            return "/".join(["/v2/models/{model}", *rest])
        case ["endpoints", _, *rest]:
            return "/".join(["/endpoints/{model}", *rest])
    return path
