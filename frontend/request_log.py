"""The access log: a line for each inference request, once its answer has ended.

Lines are made of some dozens of requests at a time, while the processor's caches still have these. They are written a
tenth of a second after the first of them, as one record of the server's log, because each record wakes the thread that
writes, which takes the interpreter from the event loop. A line costs about three microseconds. Headers, queries and
bodies are not in a line; the body is, if `log_prompts` asks for it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec

from frontend.request_record import EndedRequest
from frontend.server_log import WrittenLines, visible
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.secrets import SECRETS

_LOGGER = "access"
_TOGETHER = 64  # requests
_MOST = 1 << 20  # characters
_DELAY_S = 0.1
_PROMPT_BYTES = 8192
_DELETE = "\x7f"
_SECOND = 1e6  # in microseconds
# What JSON leaves as it is, and may still move a cursor or end a line.
_ODD = {code: f"\\u{code:04x}" for code in (*range(127, 160), 0x2028, 0x2029)}
_LINE = msgspec.json.Encoder()
_HEAD = ("time", "client", "route", "code", "duration_ms")  # what begins a line of text, without names


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

    def __init__(self, write: Callable[[Sequence[RequestLine]], str], sample: float, logs_prompts: bool) -> None:
        self._write = write
        self._sample = sample
        self._logs_prompts = logs_prompts
        self._waiting: list[EndedRequest] = []
        self._lines: list[str] = []  # of requests that do not wait any more
        self._size = 0  # of these lines
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
            self._make_lines()
        if self._size >= _MOST:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self.flush)

    def _make_lines(self) -> None:
        requests, self._waiting = self._waiting, []
        lines = self._write(_lines(requests, time.time() - time.monotonic()))
        self._lines.append(lines)
        self._size += len(lines)

    def flush(self) -> None:
        """Write what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._make_lines()
        written, self._lines, self._size = self._lines, [], 0
        if written:
            lines = SECRETS.masked("\n".join(written))
            if not lines.isascii() or _DELETE in lines:
                lines = lines.translate(_ODD)
            self._logger.handle(WrittenLines(_LOGGER, lines))


def _lines(requests: Sequence[EndedRequest], offset: float) -> list[RequestLine]:
    """Return the lines of requests; `offset` is what time.time() is ahead of time.monotonic().

    This is all in one loop, because each call of a function for each value would cost as much as the value.
    Milliseconds are cut behind three digits: round() takes several times as long.
    """
    lines = []
    at, stamp = -1, ""
    for request in requests:
        record = request.record
        sent, ended, arrived, summary = record.sent, record.ended, record.arrived, record.summary
        moment = int((ended + offset) * 1000)
        if moment != at:
            at, stamp = moment, _stamp(moment)
        line = RequestLine(
            stamp,
            request.id,
            request.model,
            request.route,
            record.code,
            request.client,
            (ended - arrived) * _SECOND // 1 / 1000,
            (sent - record.queued) * _SECOND // 1 / 1000 if sent else None,
        )
        if summary is not None:
            line.prompt_tokens = summary.prompt_tokens
            line.output_tokens = summary.output_tokens
            line.finish_reason = summary.finish_reason
            line.adapter = summary.adapter
            if summary.prefill_s is not None:
                line.ttft_ms = (sent - arrived + summary.prefill_s) * _SECOND // 1 / 1000
        if request.error:
            line.error = request.error
        if record.trace_id:
            line.trace_id = record.trace_id
        if request.body:
            line.prompt = request.body.decode(errors="replace")
        lines.append(line)
    return lines


@functools.lru_cache(256)
def _stamp(milliseconds: int) -> str:
    """Return a time.time() in ISO 8601, in UTC. Several requests end in one millisecond."""
    second, rest = divmod(milliseconds, 1000)
    return f"{_second(second)}.{rest:03d}Z"


@functools.lru_cache(4)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _json(lines: Sequence[RequestLine]) -> str:
    return _LINE.encode_lines(lines).decode().removesuffix("\n")


def _text(lines: Sequence[RequestLine]) -> str:
    return "\n".join(map(_words, lines))


def _words(line: RequestLine) -> str:
    """Return the line as words: time, client, route, code and duration, then name=value."""
    words = [line.time, "access", line.client or "-", line.route, str(line.code), f"{line.duration_ms}ms"]
    for name in _NAMED:
        value = getattr(line, name)
        if value is not None and value != "":
            words.append(f"{name}={visible(value) if isinstance(value, str) else value}")
    return " ".join(words)


_NAMED = [field for field in RequestLine.__struct_fields__ if field not in _HEAD]
_FORMATS: dict[str, Callable[[Sequence[RequestLine]], str]] = {"json": _json, "text": _text}
