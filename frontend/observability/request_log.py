"""The access log: a line for each inference request, once its answer has ended.

Many lines go to the thread that writes the log as one record: each record wakes that thread, which takes the
interpreter from the event loop several times. No line has headers or queries; the body is in a line only if
`log_prompts` asks for it.
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
_MADE_TOGETHER = 256  # lines, in 0.3 ms
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
        self._records: list[RequestRecord] = []  # whose lines are to be made
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
        if len(self._records) >= _MADE_TOGETHER:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self.flush)

    def flush(self) -> None:
        """Write what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        records, self._records = self._records, []
        if records:
            self._logger.handle(WrittenLines(_LOGGER, self._encode(_lines(records))))


def _lines(records: Sequence[RequestRecord]) -> list[RequestLine]:
    offset = time.time() - time.monotonic()
    return [_line(record, offset) for record in records]


def _line(record: RequestRecord, offset: float) -> RequestLine:
    """Return the line of a request; `offset` is what time.time() is ahead of time.monotonic().

    A struct that gets its fields in order takes two thirds of the time of one that gets them by name or later, and
    int() a fifth of the time of round().
    """
    arrived, sent, summary = record.arrived, record.sent, record.summary
    prefill_s = None if summary is None else summary.prefill_s
    line = RequestLine(
        _stamp(int((record.ended + offset) * 1000)),
        record.id if len(record.id) <= _LONGEST_ID else excerpt(record.id, _LONGEST_ID),
        record.model,
        record.route,
        record.code,
        record.client,
        int((record.ended - arrived) * 1e6 + 0.5) / 1000,
        int((sent - record.queued) * 1e6 + 0.5) / 1000 if sent else None,
        None if prefill_s is None else int((sent - arrived + prefill_s) * 1e6 + 0.5) / 1000,
        None if summary is None else summary.prompt_tokens,
        None if summary is None else summary.output_tokens,
        "" if summary is None else summary.finish_reason,
        "" if summary is None else summary.adapter,
        record.error,
        record.trace_id,
    )
    if record.prompt:
        line.prompt = record.prompt.decode(errors="replace")
    return line


@functools.lru_cache(256)  # requests of one moment end together; a stamp takes as long as the rest of a line
def _stamp(milliseconds: int) -> str:
    """Return a time.time() in ISO 8601, in UTC."""
    second, rest = divmod(milliseconds, 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(second))}.{rest:03d}Z"


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
