"""The spans of a request, sent with OpenTelemetry's SDK. Only `tracing.py` imports this.

    chat demo                            arrival to the last byte, by the conventions for generative AI and HTTP; POST
                                         /invocations if nothing was generated
      receive                            the request is read and given to the queue
      queue                              it waits for a worker
      attempt                            a worker had it and lost it; it waits again (a second `queue`)
      prefill, decode                    the worker's start to the first token, and to the last one
      format                             the rest of the answer is written and sent
      execute                            instead of these three, if nothing is known of tokens

The ids of the request's span are drawn when it begins, because the client gets them. The spans are made when the
request has ended: their times are known then. `Tracer.start_span` would take five
times as long for that as `ReadableSpan`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any, NamedTuple

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NoOpTracer,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
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
_ERROR, _UNSET = Status(StatusCode.ERROR), Status(StatusCode.UNSET)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_LONGEST = 256  # characters of a text from the client
_MOST_ATTRIBUTES = 32  # of a span here
_CHAT, _TEXT = "chat", "text_completion"
# gen_ai.operation.name by route; other routes have one if text was generated.
_OPERATIONS = {
    **dict.fromkeys((routes.CHAT_COMPLETIONS, routes.RESPONSES, *optional_dialects().chats), _CHAT),
    routes.COMPLETIONS: _TEXT,
    routes.EMBEDDINGS: "embeddings",
}


class _OneResource(Resource):  # type: ignore[misc]  # mypy skips OpenTelemetry
    """A resource that is told by itself: the hash of its values takes a fifth of the time to encode a span."""

    def __hash__(self) -> int:
        return id(self)


class OpenTelemetrySpans:
    """Begins the spans of requests, and has a thread of the SDK send them to a collector at `endpoint`.

    The SDK reads its own variables, such as OTEL_SERVICE_NAME and OTEL_EXPORTER_OTLP_HEADERS.
    """

    def __init__(self, endpoint: str) -> None:
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: _NAME}))
        self._resource = _OneResource(resource.attributes, resource.schema_url)
        self._scope = InstrumentationScope(_NAME, version(_NAME))
        self._limits = limits = SpanLimits()
        # To apply them costs as much as all else of a span: only where variables have set them.
        most, longest = limits.max_span_attributes, limits.max_span_attribute_length
        self._has_limits = longest is not None or (most is not None and most < _MOST_ATTRIBUTES)
        self._provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint))

    @property
    def is_disabled(self) -> bool:
        """Whether the SDK makes no spans: OTEL_SDK_DISABLED=true."""
        return isinstance(self._provider.get_tracer(_NAME), NoOpTracer)

    def begin(self, properties: dict[str, str], scope: Scope) -> RequestSpans:
        """Begin the span of a request with these headers: in the trace that they name, otherwise in a new one."""
        return RequestSpans(self, properties, scope)

    def context(self, parent: SpanContext | None) -> SpanContext:
        """Return the ids of a new span in the trace of its parent, or in a new one."""
        ids = self._provider.id_generator
        if parent is None:
            return SpanContext(ids.generate_trace_id(), ids.generate_span_id(), False, _SAMPLED)
        return SpanContext(parent.trace_id, ids.generate_span_id(), False, _SAMPLED, parent.trace_state)

    def send(
        self,
        name: str,
        parent: SpanContext | None,
        times: tuple[int, int],
        failed: bool,
        own: SpanContext | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """Send a span, soon. `times` are in nanoseconds of time.time(); `own` is given for the span of a request."""
        if attributes is not None and self._has_limits:
            most, longest = self._limits.max_span_attributes, self._limits.max_span_attribute_length
            attributes = BoundedAttributes(most, attributes, max_value_len=longest)
        span = ReadableSpan(
            name,
            own or self.context(parent),
            parent,
            self._resource,
            attributes,
            kind=SpanKind.INTERNAL if own is None else SpanKind.SERVER,
            status=_ERROR if failed else _UNSET,
            start_time=times[0],
            end_time=times[1],
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)

    def close(self) -> None:
        """Send what waits."""
        self._processor.shutdown()


class RequestSpans:
    """The span of one request, and those of its phases."""

    def __init__(self, spans: OpenTelemetrySpans, properties: dict[str, str], scope: Scope) -> None:
        self._spans = spans
        self._http = _http_attributes(properties, scope)
        self._began_ns = time.time_ns()
        self._offset_ns = self._began_ns - time.monotonic_ns()
        self._parent = _parent(properties) if "traceparent" in properties else None
        self._own = spans.context(self._parent)
        self.trace_id = format_trace_id(self._own.trace_id)
        self.header = f"00-{self.trace_id}-{format_span_id(self._own.span_id)}-01"

    def end(self, record: RequestRecord) -> None:
        """Send the spans, soon."""
        operation = _OPERATIONS.get(record.route, "" if record.summary is None else _TEXT)
        http = f"{self._http['http.request.method']} {self._http['http.route']}"
        name = f"{operation} {record.model}".strip() if operation else http
        failed = record.code >= FAILED and record.code != CLIENT_GONE
        attributes = self._http | _attributes(record, operation)
        times = self._began_ns, self._wall_ns(record.ended)
        self._spans.send(name, self._parent, times, failed, self._own, attributes)
        for phase in _phases(record):
            times = self._wall_ns(phase.began), self._wall_ns(phase.ended)
            self._spans.send(phase.name, self._own, times, phase.failed)

    def _wall_ns(self, moment: float) -> int:
        """Return a time.monotonic() as nanoseconds of time.time(), not before the request's span."""
        return max(self._began_ns, int(moment * 1e9) + self._offset_ns)


def _parent(properties: dict[str, str]) -> SpanContext | None:
    """Return the span that the headers name, with its state; None if they are not valid."""
    context = get_current_span(_PROPAGATOR.extract(properties)).get_span_context()
    return context if context.is_valid else None


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
