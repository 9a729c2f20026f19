"""The lines of the access log: what they say of a request, in JSON and as text.

The event loop only hands ended requests over, as msgpack. The lines are made of it by the thread that writes the log,
or, when there are many, in a process of their own (see `frontend/line_process.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec

from frontend.request_record import EndedRequest
from frontend.server_log import visible
from lmi_server.contract.secrets import Secrets

_DELETE = "\x7f"
_SECOND = 1e6  # in microseconds
# What JSON leaves as it is, and may still move a cursor or end a line.
_ODD = {code: f"\\u{code:04x}" for code in (*range(127, 160), 0x2028, 0x2029)}
_LINE = msgspec.json.Encoder()
_REQUESTS = msgspec.msgpack.Decoder(list[EndedRequest])
_HEAD = ("time", "client", "route", "code", "duration_ms")  # what begins a line of text, without names


class Batches(msgspec.Struct, array_like=True, gc=False):
    """Requests whose lines are to be made: each batch is a list of EndedRequest, as msgpack.

    `format` is a value of `access_log`; `offset` is what time.time() is ahead of time.monotonic(), in seconds;
    `secrets` are the values that lines must not show.
    """

    format: str
    offset: float
    secrets: tuple[str, ...]
    batches: list[bytes]


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


def lines_of(work: Batches) -> str:
    """Return the lines of the requests, without secrets and control characters, and without a last line end."""
    write = _FORMATS[work.format]
    text = "\n".join(write(_lines(_REQUESTS.decode(batch), work.offset)) for batch in work.batches)
    text = Secrets(work.secrets).masked(text)
    return text if text.isascii() and _DELETE not in text else text.translate(_ODD)


def _lines(requests: Sequence[EndedRequest], offset: float) -> list[RequestLine]:
    """Return the lines of requests.

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
        if request.prompt:
            line.prompt = request.prompt.decode(errors="replace")
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
"""By the value of `access_log`."""
