"""The access log: a line for each inference request, once its answer has ended.

The lines of a fifth of a second are made together, and go to the thread that writes the log as one record: each record
wakes that thread, and takes the interpreter from the event loop. No line has headers or queries; the body is in a line
only if `log_prompts` asks for it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import random
import re
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus

import msgspec

from frontend.observability.request_record import RequestRecord
from frontend.observability.server_log import WrittenLines
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.texts.quoting import excerpt

_LOGGER = "access"
_MAX_LINES = 500  # each may have a prompt
_DELAY_S = 0.2
_LONGEST_ID = 256  # characters
_WORD = re.compile(r"[^\s\"=\x00-\x1f]+")
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

    def __init__(self, format_name: str, sample: float) -> None:
        self._encode = _FORMATS[format_name]
        self._sample = sample
        self._records: list[RequestRecord] = []  # whose lines are to be written
        self._timer: asyncio.TimerHandle | None = None
        self._logger = logging.getLogger(_LOGGER)

    @classmethod
    def from_settings(cls, settings: ServerSettings) -> RequestLog | None:
        """Return the log that the settings ask for, None for none."""
        return None if settings.access_log == "off" else cls(settings.access_log, settings.access_log_sample)

    def add(self, record: RequestRecord) -> None:
        """Write the line of a request that has just ended, soon."""
        if self._sample < 1 and record.code < HTTPStatus.BAD_REQUEST and random.random() >= self._sample:
            return
        self._records.append(record)
        if len(self._records) >= _MAX_LINES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self.flush)

    def flush(self) -> None:
        """Write what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._records:
            records, self._records = self._records, []
            offset = time.time() - time.monotonic()
            lines = self._encode([_line(record, offset) for record in records])
            self._logger.handle(WrittenLines(_LOGGER, lines))


def _line(record: RequestRecord, offset: float) -> RequestLine:
    """Return the line of a request; `offset` is what time.time() is ahead of time.monotonic()."""
    arrived, sent, summary = record.arrived, record.sent, record.summary
    line = RequestLine(
        _stamp(int((record.ended + offset) * 1000)),
        record.id if len(record.id) <= _LONGEST_ID else excerpt(record.id, _LONGEST_ID),
        record.model,
        record.route,
        record.code,
        record.client,
        _milliseconds(record.ended - arrived),
        _milliseconds(sent - record.queued) if sent else None,
        error=record.error,
        trace_id=record.trace_id,
    )
    if summary is not None:
        line.prompt_tokens, line.output_tokens = summary.prompt_tokens, summary.output_tokens
        line.finish_reason, line.adapter = summary.finish_reason, summary.adapter
        if summary.prefill_s is not None:
            line.ttft_ms = _milliseconds(sent - arrived + summary.prefill_s)
    if record.prompt:
        line.prompt = record.prompt.decode(errors="replace")
    return line


@functools.lru_cache(256)  # requests of one moment end together; a stamp takes as long as the rest of a line
def _stamp(milliseconds: int) -> str:
    """Return a time.time() in ISO 8601, in UTC."""
    second, rest = divmod(milliseconds, 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(second))}.{rest:03d}Z"


def _milliseconds(seconds: float) -> float:
    return int(seconds * 1e6 + 0.5) / 1000  # a fifth of the time of round()


def _texts(lines: Sequence[RequestLine]) -> bytes:
    return "".join(map(_text, lines)).encode(errors="backslashreplace")


def _text(line: RequestLine) -> str:
    """Return the line as words: time, client, route, code and duration, then name=value."""
    words = [line.time, "access", line.client or "-", line.route, str(line.code), f"{line.duration_ms}ms"]
    for name in line.__struct_fields__:
        value = getattr(line, name)
        if name not in _HEAD and value is not None and value != "":
            words.append(f"{name}={_word(value) if isinstance(value, str) else value}")
    return f"{' '.join(words)}\n"


def _word(value: str) -> str:
    """Return a value as one word, in quotation marks as JSON has them if it would otherwise look like several."""
    return value if _WORD.fullmatch(value) else json.dumps(value, ensure_ascii=False)


_FORMATS: dict[str, Callable[[Sequence[RequestLine]], bytes]] = {
    "json": msgspec.json.Encoder().encode_lines,
    "text": _texts,
}
"""By the value of `access_log`."""
