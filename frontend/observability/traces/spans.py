"""The spans of a request, sent with OpenTelemetry's SDK. Only `tracing.py` imports this.

    chat demo                            arrival to the last byte, by the conventions for generative AI and HTTP; POST
                                         /invocations if nothing was generated
      receive                            the request is read and given to the queue
      queue                              it waits for a worker
      attempt                            a worker had it and lost it; it waits again (a second `queue`)
      prefill, decode                    the worker's start to the first token, and to the last one
      format                             the rest of the answer is written and sent
      execute                            instead of these three, if nothing is known of tokens

The ids of the request's span are drawn when it begins, because the client gets them. All else is made in the thread of
the SDK that sends them, from the record of the request, and straight into the message: 30 microseconds a request, where
the SDK's `ReadableSpan` and its encoder take 280 of the time in which the event loop could serve.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    NoOpTracer,
    SpanContext,
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

logger = logging.getLogger(__name__)

_NAME = "lmi-server"
_PROPAGATOR = TraceContextTextMapPropagator()
logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)  # its warnings quote what clients send
_ERROR, _UNSET = Status(code=Status.STATUS_CODE_ERROR), Status()
_LOCAL = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _LOCAL | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_LONGEST = 256  # characters of a text from the client
_MAX_ATTRIBUTES = 32  # of a span here
# In a message; of 500 each takes six times as long, because the message takes memory that is new each time.
_MAX_REQUESTS = 64
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
        self.frame = _frame(resource, InstrumentationScope(_NAME, version(_NAME)))
        limits = SpanLimits()
        # To apply them costs as much as all else of a span: only where variables have set them.
        self._max_count, self._max_length = limits.max_span_attributes, limits.max_span_attribute_length
        self._has_limits = self._max_length is not None or (
            self._max_count is not None and self._max_count < _MAX_ATTRIBUTES
        )
        self._provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
        self.ids = self._provider.id_generator
        self._processor = BatchSpanProcessor(
            trace_exporter.OTLPSpanExporter(endpoint), max_export_batch_size=_MAX_REQUESTS
        )

    @property
    def is_disabled(self) -> bool:
        """Whether the SDK makes no spans: OTEL_SDK_DISABLED=true."""
        return isinstance(self._provider.get_tracer(_NAME), NoOpTracer)

    def begin(self, properties: dict[str, str], scope: Scope) -> RequestSpans:
        """Begin the span of a request with these headers: in the trace that they name, otherwise in a new one."""
        return RequestSpans(self, properties, scope)

    def context(self, parent: SpanContext | None) -> SpanContext:
        """Return the ids of a new span in the trace of its parent, or in a new one."""
        if parent is None:
            return SpanContext(self.ids.generate_trace_id(), self.ids.generate_span_id(), False, _SAMPLED)
        return SpanContext(parent.trace_id, self.ids.generate_span_id(), False, _SAMPLED, parent.trace_state)

    def send(self, request: RequestSpans) -> None:
        """Send the spans of a request that has ended, soon."""
        self._processor.on_end(request)

    def limit(self, attributes: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
        """Return the attributes that the limits of the SDK's variables leave, and how many they drop."""
        if not self._has_limits:
            return attributes, 0
        bounded = BoundedAttributes(self._max_count, attributes, max_value_len=self._max_length)
        return bounded, bounded.dropped

    def close(self) -> None:
        """Send what waits."""
        self._processor.shutdown()


class RequestSpans:
    """The span of one request, and those of its phases. `context` has the ids of the first."""

    def __init__(self, spans: OpenTelemetrySpans, properties: dict[str, str], scope: Scope) -> None:
        self.origin = spans
        self._http = _http_attributes(properties, scope)
        self._began_ns = time.time_ns()
        self._offset_ns = self._began_ns - time.monotonic_ns()
        self._parent = _parent(properties) if "traceparent" in properties else None
        self.context = spans.context(self._parent)
        self.trace_id = format_trace_id(self.context.trace_id)
        self.header = f"00-{self.trace_id}-{format_span_id(self.context.span_id)}-01"
        self._record: RequestRecord | None = None

    def end(self, record: RequestRecord) -> None:
        """Send the spans, soon."""
        self._record = record
        self.origin.send(self)

    def write(self, spans: Any) -> None:
        """Add the spans to those of a message. This is for the thread that sends it."""
        record, own, parent = self._record, self.context, self._parent
        assert record is not None, "only requests that have ended are sent"
        ids = {
            "trace_id": own.trace_id.to_bytes(16),
            "trace_state": ",".join([f"{key}={value}" for key, value in own.trace_state.items()]),
        }
        own_id = own.span_id.to_bytes(8)
        operation = _OPERATIONS.get(record.route, "" if record.summary is None else _TEXT)
        http = f"{self._http['http.request.method']} {self._http['http.route']}"
        attributes, dropped = self.origin.limit(self._http | _attributes(record, operation))
        whole = spans.add(
            span_id=own_id,
            parent_span_id=b"" if parent is None else parent.span_id.to_bytes(8),
            flags=_LOCAL if parent is None or not parent.is_remote else _REMOTE,
            name=f"{operation} {record.model}".strip() if operation else http,
            kind=Span.SPAN_KIND_SERVER,
            start_time_unix_nano=self._began_ns,
            end_time_unix_nano=self._wall_ns(record.ended),
            status=_ERROR if record.code >= FAILED and record.code != CLIENT_GONE else _UNSET,
            dropped_attributes_count=dropped,
            **ids,
        )
        _add_attributes(whole.attributes, attributes)
        for phase in _phases(record):
            spans.add(
                span_id=self.origin.ids.generate_span_id().to_bytes(8),
                parent_span_id=own_id,
                flags=_LOCAL,
                name=phase.name,
                kind=Span.SPAN_KIND_INTERNAL,
                start_time_unix_nano=self._wall_ns(phase.began),
                end_time_unix_nano=self._wall_ns(phase.ended),
                status=_ERROR if phase.failed else _UNSET,
                **ids,
            )

    def _wall_ns(self, moment: float) -> int:
        """Return a time.monotonic() as nanoseconds of time.time(), not before the request's span."""
        return max(self._began_ns, int(moment * 1e9) + self._offset_ns)


def _encode(requests: Sequence[RequestSpans]) -> ExportTraceServiceRequest:
    """Return the message with the spans of requests of one server."""
    message = ExportTraceServiceRequest()
    message.CopyFrom(requests[0].origin.frame)
    spans = message.resource_spans[0].scope_spans[0].spans
    for request in requests:
        count = len(spans)
        try:
            request.write(spans)
        except Exception:  # it must not cost the other requests their spans
            del spans[count:]
            logger.exception("the spans of trace %s cannot be made", request.trace_id)
    return message


trace_exporter.encode_spans = _encode  # the exporter has no parameter for it


def _frame(resource: Resource, scope: InstrumentationScope) -> ExportTraceServiceRequest:
    """Return a message without spans."""
    frame: ExportTraceServiceRequest = encode_spans(
        [ReadableSpan("", INVALID_SPAN_CONTEXT, resource=resource, instrumentation_scope=scope)]
    )
    del frame.resource_spans[0].scope_spans[0].spans[:]
    return frame


def _add_attributes(written: Any, attributes: Mapping[str, Any]) -> None:
    for key, value in attributes.items():
        to = written.add(key=key).value
        if isinstance(value, str):
            to.string_value = value
        elif isinstance(value, int):
            to.int_value = value
        elif isinstance(value, float):
            to.double_value = value
        else:
            to.array_value.values.extend([AnyValue(string_value=each) for each in value])


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
