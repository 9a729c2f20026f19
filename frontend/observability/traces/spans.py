"""The spans of a request in OpenTelemetry's form, sent by OTLP over HTTP. Only `tracing.py` imports this.

    chat demo                            arrival to the last byte, by the conventions for generative AI and HTTP; POST
                                         /invocations if nothing was generated
      receive                            the request is read and given to the queue
      queue                              it waits for a worker
      attempt                            a worker had it and lost it; it waits again (a second `queue`)
      prefill, decode                    the worker's start to the first token, and to the last one
      format                             the rest of the answer is written and sent
      execute                            instead of these three, if nothing is known of tokens

All times are known when the request has ended. Its spans are made then, as the bytes that are sent
(`otlp.py`), together with those of a few others: one by one, each time with the code out of the processor's
cache, they took four times as long. The thread of the SDK's exporter only puts them together and sends them: whatever
Python it runs takes the interpreter from the event loop. A span of the SDK's tracer, which measures the times itself,
costs many times as much.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import NamedTuple

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from frontend.observability.metrics.lmi import CLIENT_GONE
from frontend.observability.request_record import FAILED, EndedRequest
from frontend.observability.trace_context import HttpRequest, RequestTrace
from frontend.observability.traces import otlp
from lmi_server.dialects import routes

_NAME = "lmi-server"
_SAMPLED = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
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


class _Waiting(NamedTuple):
    """The spans of a request. The SDK's queue takes them for one span, of which it reads `context` only."""

    spans: bytes
    context: SpanContext = _SAMPLED


class _Exporter(OTLPSpanExporter):  # type: ignore[misc]  # mypy skips OpenTelemetry
    """Sends the spans of requests under one resource."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: _NAME}))
        self._resource = resource
        self._scope = (_NAME, version(_NAME))

    def export(self, spans: Sequence[_Waiting]) -> SpanExportResult:
        encoded = [waiting.spans for waiting in spans]
        body = otlp.request(self._resource.attributes, self._resource.schema_url, self._scope, encoded)
        return SpanExportResult.SUCCESS if self._client.export(body).success else SpanExportResult.FAILURE


class OpenTelemetrySpans:
    """Sends spans to a collector at `endpoint`, in a thread of the SDK.

    The SDK reads its own variables, such as OTEL_SERVICE_NAME and OTEL_EXPORTER_OTLP_HEADERS.
    """

    def __init__(self, endpoint: str) -> None:
        self._processor = BatchSpanProcessor(_Exporter(endpoint))

    def write(self, request: EndedRequest, trace: RequestTrace) -> None:
        """Send the span of a request and those of its phases, soon."""
        self._processor.on_end(_Waiting(written(request, trace, time.time() - time.monotonic())))

    def close(self) -> None:
        self._processor.shutdown()


def written(request: EndedRequest, trace: RequestTrace, offset: float) -> bytes:
    """Return the spans of a request as OTLP has them; `offset` is what time.time() is ahead of time.monotonic()."""
    state = _state(trace.state) if trace.state else ""
    trace_id, own, parent = (bytes.fromhex(digits) for digits in (trace.trace_id, trace.span_id, trace.parent_id))
    operation = _operation(request)
    spans = [
        otlp.span(
            (trace_id, own, parent),
            f"{operation} {request.model}".strip()
            if operation
            else f"{trace.http.method} {http_route(trace.http.path)}",
            otlp.SERVER,
            (int((request.arrived + offset) * 1e9), int((request.ended + offset) * 1e9)),
            _attributes(request, operation) + _http_attributes(trace.http),
            state=state,
            failed=_fails(request),
            is_remote=bool(parent),
        )
    ]
    for phase in _phases(request):
        ids = (trace_id, (random.getrandbits(64) or 1).to_bytes(8), own)
        times = (int((phase.began + offset) * 1e9), int((phase.ended + offset) * 1e9))
        spans.append(otlp.span(ids, phase.name, otlp.INTERNAL, times, state=state, failed=phase.failed))
    return b"".join(spans)


def _state(header: str) -> str:
    """Return a header tracestate without what is not valid in it."""
    return str(TraceState.from_header([header]).to_header())


def _fails(request: EndedRequest) -> bool:
    """Return whether the server or the model failed, and not the client."""
    return request.code >= FAILED and request.code != CLIENT_GONE


def _operation(request: EndedRequest) -> str:
    return _OPERATIONS.get(request.route, "" if request.summary is None else _TEXT)


def _attributes(request: EndedRequest, operation: str) -> bytes:
    """Return what the semantic conventions for HTTP and generative AI name, and what is the server's own."""
    attributes = [
        _often("http.response.status_code", request.code),
        otlp.attribute("lmi.request.id", request.id),
        _often("lmi.route", request.route),
    ]
    if request.client:
        attributes.append(_often("client.address", request.client))
    if request.code >= 400:
        attributes.append(_often("error.type", request.error or str(request.code)))
    if operation:
        attributes += [_often("gen_ai.operation.name", operation), _often("gen_ai.provider.name", _NAME)]
        if request.model:
            attributes.append(_often("gen_ai.request.model", request.model))
            attributes.append(_often("gen_ai.response.model", request.model))
    summary = request.summary
    if summary is not None:
        attributes.append(_often("gen_ai.usage.input_tokens", summary.prompt_tokens))
        attributes.append(_often("gen_ai.usage.output_tokens", summary.output_tokens))
        attributes.append(_often("gen_ai.usage.cache_read.input_tokens", summary.cached_tokens))
        attributes.append(_often("gen_ai.response.finish_reasons", (summary.finish_reason,)))
        if summary.adapter:
            attributes.append(_often("lmi.adapter", summary.adapter))
        if (first_token_s := request.first_token_s) is not None:
            attributes.append(otlp.attribute("gen_ai.response.time_to_first_chunk", first_token_s))
    return b"".join(attributes)


def _http_attributes(http: HttpRequest) -> bytes:
    attributes = [
        _often("http.request.method", http.method),
        _often("http.route", http_route(http.path)),
        otlp.attribute("url.path", http.path),
        _often("url.scheme", http.scheme),
        _often("network.protocol.name", "http"),
        _often("network.protocol.version", http.version),
    ]
    if http.server is not None:
        address, port = http.server
        attributes.append(_often("server.address", address))
        if port is not None:
            attributes.append(_often("server.port", port))
    if http.user_agent:
        attributes.append(_often("user_agent.original", http.user_agent))
    return b"".join(attributes)


def http_route(path: str) -> str:
    """Return a path of inference with {model} and {version} in the place of names, of which there may be many."""
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


# The same few values come again and again.
_often = functools.lru_cache(1024)(otlp.attribute)


def _phases(request: EndedRequest) -> Iterator[_Phase]:
    if not request.queued:  # it was refused
        yield _Phase("receive", request.arrived, request.ended)
        return
    yield _Phase("receive", request.arrived, request.queued)
    waits = request.queued
    for sent, lost in request.attempts:
        yield _Phase("queue", waits, sent)
        yield _Phase("attempt", sent, lost, failed=True)
        waits = lost
    yield _Phase("queue", waits, request.sent)
    summary = request.summary
    if summary is None or summary.prefill_s is None:
        yield _Phase("execute", request.sent, request.ended)
        return
    first, last = request.sent + summary.prefill_s, request.sent + summary.generate_s
    yield _Phase("prefill", request.sent, first)
    yield _Phase("decode", first, last)
    yield _Phase("format", last, max(last, request.ended))
