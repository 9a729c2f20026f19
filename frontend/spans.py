"""The spans of a request in OpenTelemetry's form, sent by OTLP over HTTP. Only `frontend/tracing.py` imports this.

    chat demo                            arrival to the last byte, by the conventions for generative AI and HTTP
      receive                            the request is read and given to the queue
      queue                              it waits for a worker
      attempt                            a worker had it and lost it; it waits again (a second `queue`)
      prefill, decode                    the worker's start to the first token, and to the last one
      format                             the rest of the answer is written and sent
      execute                            instead of these three, if nothing is known of tokens

All times are known when the request has ended, so that its spans are made then. A span of the SDK's tracer, which
measures them itself, costs several times as much.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import NamedTuple

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode
from opentelemetry.util.types import AttributeValue

from frontend.lmi_metrics import CLIENT_GONE
from frontend.request_record import EndedRequest
from frontend.tracing import RequestTrace
from lmi_server.dialects import routes

_NAME = "lmi-server"
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET, _FAILED = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
_CHAT, _TEXT = "chat", "text_completion"
# gen_ai.operation.name by route; other routes have one if text was generated.
_OPERATIONS = {
    **dict.fromkeys((routes.CHAT_COMPLETIONS, routes.RESPONSES, routes.MESSAGES), _CHAT),
    routes.COMPLETIONS: _TEXT,
    routes.EMBEDDINGS: "embeddings",
}


class _Phase(NamedTuple):
    name: str
    began: float
    ended: float
    failed: bool = False


class _HashedResource(Resource):  # type: ignore[misc]  # mypy skips OpenTelemetry
    """A resource with a hash that is computed once: the SDK computes it for each span, a quarter of the cost."""

    @functools.cached_property
    def _hash(self) -> int:
        return int(super().__hash__())

    def __hash__(self) -> int:
        return self._hash

    __eq__ = Resource.__eq__


class OpenTelemetrySpans:
    """Sends spans to a collector at `endpoint`, in a thread of the SDK.

    The SDK reads its own variables, such as OTEL_SERVICE_NAME and OTEL_EXPORTER_OTLP_HEADERS.
    """

    def __init__(self, endpoint: str) -> None:
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint))
        self._scope = InstrumentationScope(_NAME, version(_NAME))
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: _NAME}))
        self._resource = _HashedResource(resource.attributes, resource.schema_url)

    def write(self, trace: RequestTrace, request: EndedRequest) -> None:
        """Send the span of a request and those of its phases, soon."""
        record = request.record
        offset = time.time() - time.monotonic()
        state = TraceState.from_header([trace.state]) if trace.state else None
        own = self._context(trace, trace.span_id, state)
        parent = self._context(trace, trace.parent_id, state, is_remote=True) if trace.parent_id else None
        operation = _operation(request)
        whole = _Phase(
            f"{operation or request.route} {request.model}".strip(), record.arrived, record.ended, _fails(request)
        )
        self._send(whole, offset, own, parent, SpanKind.SERVER, _attributes(request, operation))
        for phase in _phases(request):
            context = self._context(trace, f"{random.getrandbits(64) or 1:x}", state)
            self._send(phase, offset, context, own, SpanKind.INTERNAL, {})

    def close(self) -> None:
        self._processor.shutdown()

    def _context(
        self, trace: RequestTrace, span_id: str, state: TraceState | None, is_remote: bool = False
    ) -> SpanContext:
        return SpanContext(int(trace.trace_id, 16), int(span_id, 16), is_remote, _SAMPLED, state)

    def _send(
        self,
        phase: _Phase,
        offset: float,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        attributes: dict[str, AttributeValue],
    ) -> None:
        span = ReadableSpan(
            phase.name,
            context,
            parent,
            self._resource,
            attributes,
            kind=kind,
            status=_FAILED if phase.failed else _UNSET,
            start_time=int((phase.began + offset) * 1e9),
            end_time=int((phase.ended + offset) * 1e9),
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)


def _fails(request: EndedRequest) -> bool:
    """Return whether the server failed, and not the client: 424 is a failure of the model."""
    return request.record.code >= 424 and request.record.code != CLIENT_GONE


def _operation(request: EndedRequest) -> str:
    return _OPERATIONS.get(request.route, "" if request.record.summary is None else _TEXT)


def _attributes(request: EndedRequest, operation: str) -> dict[str, AttributeValue]:
    """Return what the semantic conventions for HTTP and generative AI name, and what is the server's own."""
    record = request.record
    attributes: dict[str, AttributeValue] = {
        "http.response.status_code": record.code,
        "lmi.request.id": request.id,
        "lmi.route": request.route,
    }
    if request.client:
        attributes["client.address"] = request.client
    if record.code >= 400:
        attributes["error.type"] = request.error or str(record.code)
    if operation:
        attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": _NAME}
        if request.model:
            attributes |= {"gen_ai.request.model": request.model, "gen_ai.response.model": request.model}
    summary = record.summary
    if summary is not None:
        attributes["gen_ai.usage.input_tokens"] = summary.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = summary.output_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = summary.cached_tokens
        attributes["gen_ai.response.finish_reasons"] = (summary.finish_reason,)
        if summary.adapter:
            attributes["lmi.adapter"] = summary.adapter
        if (first_token_s := record.first_token_s) is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = first_token_s
    return attributes


def _phases(request: EndedRequest) -> Iterator[_Phase]:
    record = request.record
    if not record.queued:  # it was refused
        yield _Phase("receive", record.arrived, record.ended)
        return
    yield _Phase("receive", record.arrived, record.queued)
    waits = record.queued
    for sent, lost in request.attempts:
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
