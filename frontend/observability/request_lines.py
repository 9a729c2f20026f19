"""The lines of the access log: what they say of a request, in JSON and as text."""

from __future__ import annotations

import functools
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from http import HTTPStatus

import msgspec

from frontend.observability.request_record import RequestRecord
from lmi_server.contract.quoting import NOT_FOR_TERMINALS, excerpt
from lmi_server.contract.secrets import SECRETS

_DELETE = b"\x7f"
_WORD = re.compile(r"[^\s\"=\x00-\x1f]+")
_LONGEST_ID = 256  # characters
_SECOND = 1e6  # in microseconds
_WHOLE = 2.0**52  # a double of this size has no bits for a fraction
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


class RequestLines:
    """Lines of requests, put one behind the other until the log is written.

    `format_name` is a value of `access_log`; of successes only the share `sample` has lines. `count` lines take `size`
    bytes; both are right after `encode`.
    """

    def __init__(self, format_name: str, sample: float) -> None:
        self.count = self.size = 0
        self._parts: list[bytes] = []
        self._lines: list[RequestLine] = []  # that are not encoded yet
        self._encode = _FORMATS[format_name]
        self._samples = sample < 1
        self._sample = sample
        self._offset = time.time() - time.monotonic()
        self._since = self._until = 0.0  # the millisecond that `_stamp` names, in time.monotonic()
        self._stamp = ""

    def add(
        self,
        record: RequestRecord,
        request_id: str,
        model: str,
        route: str,
        client: str,
        error: str,
        prompt: bytes | None = None,
    ) -> None:
        """Add the line of a request that has just ended; call `encode` behind the last one of a group.

        `model` is the label of the model, "" for none; `client` is an address, "" on a Unix socket; `error` is the kind
        of an error. `prompt` is how the body begins, if prompts are logged.

        Times are whole microseconds: adding 2**52 and taking it away again rounds as round() does, and is faster.
        """
        code = record.code
        if self._samples and code < HTTPStatus.BAD_REQUEST and random.random() >= self._sample:
            return
        sent, ended, arrived, summary = record.sent, record.ended, record.arrived, record.summary
        if not self._since <= ended < self._until:  # several requests end in one millisecond
            moment = int((ended + self._offset) * 1000)
            self._since, self._until = moment / 1000 - self._offset, (moment + 1) / 1000 - self._offset
            self._stamp = _stamp(moment)
        prompt_tokens = output_tokens = ttft_ms = None
        finish_reason = adapter = ""
        if summary is not None:
            prompt_tokens, output_tokens = summary.prompt_tokens, summary.output_tokens
            finish_reason, adapter, prefill_s = summary.finish_reason, summary.adapter, summary.prefill_s
            if prefill_s is not None:
                ttft_ms = ((sent - arrived + prefill_s) * _SECOND + _WHOLE - _WHOLE) / 1000
        line = RequestLine(
            self._stamp,
            request_id if len(request_id) <= _LONGEST_ID else excerpt(request_id, _LONGEST_ID),
            model,
            route,
            code,
            client,
            ((ended - arrived) * _SECOND + _WHOLE - _WHOLE) / 1000,
            ((sent - record.queued) * _SECOND + _WHOLE - _WHOLE) / 1000 if sent else None,
            ttft_ms,
            prompt_tokens,
            output_tokens,
            finish_reason,
            adapter,
            error,
            record.trace_id,
            prompt.decode(errors="replace") if prompt else "",
        )
        self._lines.append(line)

    def encode(self) -> None:
        """Encode the lines that were added: many together take a fraction of the time."""
        lines, self._lines = self._lines, []
        encoded = self._encode(lines)
        self._parts.append(encoded)
        self.size += len(encoded)
        self.count += len(lines)

    def __bytes__(self) -> bytes:
        """Return the lines, without secrets and control characters, each with its line end."""
        encoded = b"".join(self._parts)
        if encoded.isascii() and _DELETE not in encoded and not SECRETS.may_be_in(encoded):
            return encoded
        # Line by line: other threads wait for the interpreter while one text is searched.
        lines = encoded.decode().splitlines(keepends=True)
        return "".join([SECRETS.masked(line).translate(NOT_FOR_TERMINALS) for line in lines]).encode()


def _stamp(milliseconds: int) -> str:
    """Return a time.time() in ISO 8601, in UTC."""
    second, rest = divmod(milliseconds, 1000)
    return f"{_second(second)}.{rest:03d}Z"


@functools.lru_cache(4)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


_encode_lines = msgspec.json.Encoder().encode_lines


def _text(lines: Sequence[RequestLine]) -> bytes:
    return "".join(map(_words, lines)).encode(errors="backslashreplace")


def _words(line: RequestLine) -> str:
    """Return the line as words: time, client, route, code and duration, then name=value."""
    words = [line.time, "access", line.client or "-", line.route, str(line.code), f"{line.duration_ms}ms"]
    for name in _NAMED:
        value = getattr(line, name)
        if value is not None and value != "":
            words.append(f"{name}={_word(value) if isinstance(value, str) else value}")
    return f"{' '.join(words)}\n"


def _word(value: str) -> str:
    """Return a value as one word, in quotation marks as JSON has them if it would otherwise look like several."""
    return value if _WORD.fullmatch(value) else json.dumps(value, ensure_ascii=False)


_NAMED = [field for field in RequestLine.__struct_fields__ if field not in _HEAD]
_FORMATS: dict[str, Callable[[Sequence[RequestLine]], bytes]] = {"json": _encode_lines, "text": _text}
"""By the value of `access_log`."""
