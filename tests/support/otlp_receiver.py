"""A receiver of traces in place of a collector: OTLP over HTTP, read with OpenTelemetry's own messages.

It is no collector: it keeps the spans, and answers as the protocol demands.
"""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Received(NamedTuple):
    """A span with its ids in hexadecimal digits, and the attributes of its resource."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    failed: bool
    began: int
    ended: int
    kind: int
    state: str


class Receiver:
    """Listens on a port of this machine until `close`."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                assert self.headers["content-type"] == "application/x-protobuf"
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers["content-encoding"] == "gzip":
                    body = gzip.decompress(body)
                spans.extend(_spans(ExportTraceServiceRequest.FromString(body)))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                """Write nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def of_trace(self, trace_id: str) -> dict[str, Received]:
        """Return the spans of a trace by name; of several with one name the last."""
        return {span.name: span for span in self.spans if span.trace_id == trace_id}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _spans(request: Any) -> list[Received]:
    return [
        Received(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            _values(span.attributes),
            _values(resource.resource.attributes),
            span.status.code == 2,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            span.kind,
            span.trace_state,
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
