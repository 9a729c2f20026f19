"""The access log: a line for each inference request, once its answer has ended.

Requests wait in a list and are written some dozens at a time, as one record of the server's log: that costs a request a
few microseconds. Headers, queries and bodies are not in a line; the body is, if `log_prompts` asks for it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from frontend.request_record import EndedRequest
from frontend.server_log import WrittenLines, visible
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.secrets import SECRETS

_LOGGER = "access"
_TOGETHER = 256  # requests
_DELAY_S = 0.1
_PROMPT_BYTES = 8192
_DELETE = "\x7f"
# What JSON leaves as it is, and may still move a cursor or end a line.
_ODD = {code: f"\\u{code:04x}" for code in (*range(127, 160), 0x2028, 0x2029)}
_LINE = msgspec.json.Encoder()


class RequestLine(msgspec.Struct, gc=False, omit_defaults=True, tag="access", tag_field="log"):
    """One line; in JSON, fields that have no value are left out. Times are milliseconds."""

    time: str
    id: str
    model: str
    route: str
    code: int
    client: str
    duration_ms: float
    queue_ms: float | None = None
    ttft_ms: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str = ""
    adapter: str = ""
    error: str = ""
    trace_id: str = ""
    prompt: str = ""


class RequestLog:
    """Writes lines in one of the formats of `access_log`; with a `sample` below 1 only that share of the successes."""

    def __init__(self, write: Callable[[RequestLine], str], sample: float, logs_prompts: bool) -> None:
        self._write = write
        self._sample = sample
        self._logs_prompts = logs_prompts
        self._waiting: list[EndedRequest] = []
        self._timer: asyncio.TimerHandle | None = None
        self._logger = logging.getLogger(_LOGGER)

    @classmethod
    def of(cls, settings: ServerSettings) -> RequestLog | None:
        """Return the log that the settings ask for, None for none."""
        write = _FORMATS.get(settings.access_log)
        return None if write is None else cls(write, settings.access_log_sample, settings.log_prompts)

    def add(self, request: EndedRequest) -> None:
        """Write a line for a request, soon."""
        if self._sample < 1 and request.record.code < 400 and random.random() >= self._sample:
            return
        request.body = request.body[:_PROMPT_BYTES] if request.body and self._logs_prompts else None
        waiting = self._waiting
        waiting.append(request)
        if len(waiting) >= _TOGETHER:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self.flush)

    def flush(self) -> None:
        """Write what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        requests, self._waiting = self._waiting, []
        if requests:
            offset = time.time() - time.monotonic()
            lines = SECRETS.masked("\n".join([self._write(_line(request, offset)) for request in requests]))
            if not lines.isascii() or _DELETE in lines:
                lines = lines.translate(_ODD)
            self._logger.handle(WrittenLines(_LOGGER, lines))


def _line(request: EndedRequest, offset: float) -> RequestLine:
    record = request.record
    summary = record.summary
    line = RequestLine(
        _stamp(int((record.ended + offset) * 1000)),
        request.id,
        request.model,
        request.route,
        record.code,
        request.client,
        _milliseconds(record.ended - record.arrived),
        _milliseconds(record.sent - record.queued) if record.sent else None,
    )
    if summary is not None:
        line.prompt_tokens = summary.prompt_tokens
        line.output_tokens = summary.output_tokens
        line.finish_reason = summary.finish_reason
        line.adapter = summary.adapter
        if summary.prefill_s is not None:
            line.ttft_ms = _milliseconds(record.sent - record.arrived + summary.prefill_s)
    if request.error:
        line.error = request.error
    if record.trace_id:
        line.trace_id = record.trace_id
    if request.body:
        line.prompt = request.body.decode(errors="replace")
    return line


def _milliseconds(seconds: float) -> float:
    """Return milliseconds with three digits behind the point; round() takes twice as long."""
    return int(seconds * 1e6) / 1000


@functools.lru_cache(256)
def _stamp(milliseconds: int) -> str:
    """Return a time.time() in ISO 8601, in UTC. Several requests end in one millisecond."""
    second, rest = divmod(milliseconds, 1000)
    return f"{_second(second)}.{rest:03d}Z"


@functools.lru_cache(4)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _json(line: RequestLine) -> str:
    return _LINE.encode(line).decode()


def _text(line: RequestLine) -> str:
    """Return the line as words: time, client, route, code and duration, then name=value."""
    named = msgspec.structs.asdict(line)
    head = [named.pop(name) for name in ("time", "client", "route", "code", "duration_ms")]
    words = [f"{name}={visible(str(value))}" for name, value in named.items() if value not in (None, "")]
    return " ".join([head[0], "access", head[1] or "-", *map(str, head[2:4]), f"{head[4]}ms", *words])


_FORMATS: dict[str, Callable[[RequestLine], str]] = {"json": _json, "text": _text}
