"""Spans that are written byte by byte are what OpenTelemetry's own messages and its SDK make of them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from frontend.observability.traces import otlp

pytest.importorskip("opentelemetry.sdk", reason="pip install lmi-server[otel]")

ATTRIBUTES: dict[str, Any] = {
    "code": 200,
    "large": 2**40,
    "below zero": -1,
    "seconds": 0.25,
    "yes": True,
    "no": False,
    "name": "käse 🧀",
    "long": "x" * 20_000,
    "reasons": ("stop", "length"),
    "none": "",
}
BEGAN, ENDED = 1_700_000_000_000_000_000, 1_700_000_000_250_000_000


def sdk_request(parent_is_remote: bool, state: str, failed: bool) -> bytes:
    """Return what the SDK sends for one span with these properties."""
    sdk, trace = import_module("opentelemetry.sdk.trace"), import_module("opentelemetry.trace")
    resource = import_module("opentelemetry.sdk.resources").Resource({"service.name": "a"}, "https://schema")
    scope = import_module("opentelemetry.sdk.util.instrumentation").InstrumentationScope("lmi-server", "1.2")
    encode = import_module("opentelemetry.exporter.otlp.proto.common.trace_encoder").encode_spans
    states = trace.TraceState.from_header([state])
    status = trace.StatusCode.ERROR if failed else trace.StatusCode.UNSET
    span = sdk.ReadableSpan(
        "chat model",
        trace.SpanContext(1, 2, is_remote=False, trace_state=states),
        trace.SpanContext(1, 3, is_remote=parent_is_remote, trace_state=states),
        resource,
        ATTRIBUTES,
        kind=trace.SpanKind.SERVER,
        status=trace.Status(status),
        start_time=BEGAN,
        end_time=ENDED,
        instrumentation_scope=scope,
    )
    return bytes(encode([span, span]).SerializeToString())


@pytest.mark.parametrize(("is_remote", "state", "failed"), [(True, "vendor=1,other=2", True), (False, "", False)])
def test_a_span_is_what_the_sdk_sends(is_remote: bool, state: str, failed: bool) -> None:
    message = import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2").ExportTraceServiceRequest
    span = otlp.span(
        ((1).to_bytes(16), (2).to_bytes(8), (3).to_bytes(8)),
        "chat model",
        otlp.SERVER,
        (BEGAN, ENDED),
        b"".join([otlp.attribute(key, value) for key, value in ATTRIBUTES.items()]),
        state=state,
        failed=failed,
        is_remote=is_remote,
    )
    written = message.FromString(
        otlp.request({"service.name": "a"}, "https://schema", ("lmi-server", "1.2"), [span] * 2)
    )
    wanted = message.FromString(sdk_request(is_remote, state, failed))
    for request in (written, wanted):
        for each in request.resource_spans[0].scope_spans[0].spans:
            each.status.SetInParent()  # a status that says nothing may be there or not
    assert written == wanted
