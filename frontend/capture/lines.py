"""The line of JSON for one exchange, as SageMaker's data capture has it.

https://docs.aws.amazon.com/sagemaker/latest/dg/model-monitor-data-capture-endpoint.html describes the format. The
status and the times are in `customAttributes`, which are texts of the form name=value.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

import msgspec

from frontend.capture.exchange import CapturedExchange, Part
from lmi_server.contract.texts.sendable import json_bytes

REDACTED = "[redacted]"
_DATA = b"data:"
_BY_LINE = ("event-stream", "jsonlines", "ndjson")  # content types of streams
_DEEPEST = 64  # levels of JSON in which fields are looked for


def captured_line(exchange: CapturedExchange, redacted: Collection[str]) -> bytes:
    """Return the line, with its end. The values of the fields that `redacted` names are replaced, wherever they are."""
    milliseconds = (exchange.ended - exchange.began) * 1000
    attributes = {
        "route": exchange.route,
        "path": exchange.path,
        "status": str(exchange.status),
        "duration_ms": f"{milliseconds:.1f}",
        "truncated": ",".join(
            name for name, part in (("input", exchange.request), ("output", exchange.answer)) if part.is_cut
        ),
    }
    metadata: dict[str, Any] = {
        "eventId": str(uuid.uuid4()),
        "inferenceTime": datetime.fromtimestamp(exchange.arrived, UTC).isoformat(timespec="milliseconds"),
        "customAttributes": [f"{name}={value}" for name, value in attributes.items() if value],
    }
    if exchange.inference_id:
        metadata["inferenceId"] = exchange.inference_id
    captured = {
        "endpointInput": _side(exchange.request, "INPUT", redacted),
        "endpointOutput": _side(exchange.answer, "OUTPUT", redacted),
    }
    return json_bytes({"captureData": captured, "eventMetadata": metadata, "eventVersion": "0"}) + b"\n"


def _side(part: Part, mode: str, redacted: Collection[str]) -> dict[str, str]:
    data = _redact(part, redacted) if redacted else bytes(part.data)
    kind = part.content_type.partition(";")[0].strip().lower()
    encoding = "CSV" if kind == "text/csv" else "JSON" if kind.endswith("json") else "BASE64"
    try:
        text = base64.b64encode(data).decode() if encoding == "BASE64" else data.decode()
    except UnicodeDecodeError:
        encoding, text = "BASE64", base64.b64encode(data).decode()
    return {"observedContentType": part.content_type, "mode": mode, "data": text, "encoding": encoding}


def _redact(part: Part, names: Collection[str]) -> bytes:
    """Return a body with the fields' values replaced; what is not JSON may hold them anywhere, and is left out."""
    data = bytes(part.data)
    if not data.strip():
        return data
    if any(kind in part.content_type for kind in _BY_LINE):
        return b"\n".join(_redacted_line(line, names) for line in data.split(b"\n"))
    return _redacted_json(data, names)


def _redacted_line(line: bytes, names: Collection[str]) -> bytes:
    """Return a line of a stream: a server-sent event, or JSON by itself."""
    text = line.strip()
    if not text or text == b"data: [DONE]" or text.startswith(b"event:"):
        return line
    if text.startswith(_DATA):
        return b"data: " + _redacted_json(text[len(_DATA) :], names)
    return _redacted_json(text, names)


def _redacted_json(data: bytes, names: Collection[str]) -> bytes:
    try:
        return json_bytes(_replace(msgspec.json.decode(data), names, _DEEPEST))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return b'"[redacted]"'


def _replace(value: Any, names: Collection[str], levels: int) -> Any:
    if not levels:
        return REDACTED
    if isinstance(value, dict):
        return {key: REDACTED if key in names else _replace(held, names, levels - 1) for key, held in value.items()}
    if isinstance(value, list):
        return [_replace(held, names, levels - 1) for held in value]
    return value
