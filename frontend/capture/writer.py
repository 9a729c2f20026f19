"""The thread that makes lines of captured exchanges and keeps them: no request waits for a disk."""

from __future__ import annotations

import base64
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

import msgspec

from frontend.capture.destinations import Destination, LostError
from frontend.capture.exchange import CapturedExchange, Part
from lmi_server.contract.texts.sendable import json_bytes

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
_REPORT_S = 60.0  # between two lines of the log about exchanges that are lost
REDACTED = "[redacted]"
_DATA = b"data:"
_BY_LINE = ("event-stream", "jsonlines", "ndjson")  # content types of streams
_DEEPEST = 64  # levels of JSON in which fields are looked for


class CaptureWriter:
    """Writes exchanges in the order of their ends.

    Each is counted once: it is `written` when it is kept, `failed` if the disk or S3 did not take it, and `dropped` if
    there was no memory for it. `failures` counts the writes that failed, each perhaps of many exchanges.
    """

    def __init__(self, destination: Destination, redacted: Collection[str]) -> None:
        self.written = self.dropped = self.failed = self.failures = 0
        self._destination = destination
        self._redacted = redacted
        self._queue: deque[CapturedExchange] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._reported = -_REPORT_S
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    def add(self, exchange: CapturedExchange) -> None:
        """Have an exchange written, unless its memory was refused."""
        if exchange.is_lost or self._closing:
            exchange.release()
            self.dropped += 1
            self._report("capture_memory has no room for more")
            return
        with self._wake:
            self._queue.append(exchange)
            self._wake.notify()

    def close(self, timeout_s: float) -> None:
        """Write what waits, within `timeout_s` seconds."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while self._wait():
            while self._queue:
                self._write(self._queue.popleft())
            self._flush(now=False)
        self._flush(now=True)

    def _wait(self) -> bool:
        """Wait for an exchange, or a second; return False once all is written and no more come."""
        with self._wake:
            if not self._queue and not self._closing:
                self._wake.wait(_PAUSE_S)
            return bool(self._queue) or not self._closing

    def _write(self, exchange: CapturedExchange) -> None:
        try:
            self.written += self._destination.write(captured_line(exchange, self._redacted))
        # The border to disks and networks, and to bodies of clients: one exchange is lost, and the thread goes on.
        except Exception as error:  # noqa: BLE001
            self._fail(error, 1)
        finally:
            exchange.release()

    def _flush(self, now: bool) -> None:
        try:
            self.written += self._destination.flush(now)
        except Exception as error:  # noqa: BLE001 - the border to disks and networks
            self._fail(error, 0)

    def _fail(self, error: Exception, count: int) -> None:
        """Count the exchanges that a failed write has lost, `count` if it does not say how many."""
        self.failures += 1
        self.failed += error.count if isinstance(error, LostError) else count
        self._report(str(error))

    def _report(self, reason: str) -> None:
        if time.monotonic() - self._reported >= _REPORT_S:
            self._reported = time.monotonic()
            logger.warning("captured requests are lost, %d so far: %s", self.dropped + self.failed, reason)


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
