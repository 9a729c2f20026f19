"""Encodes JSON objects, and frames them as the lines or events of a stream."""

from __future__ import annotations

from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode

# These three characters (U+2028, U+2029, U+0085) are legal inside a JSON string. But clients that split a stream as
# Python's str.splitlines does take them for line ends and then fail on half an object.
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def encode_line(value: Any) -> bytes:
    """Return `value` as JSON on one line, whatever a client takes for a line end."""
    data = encode(value)
    return data if data.isascii() else on_one_line(data)  # most tokens are; the check costs less than three searches


def on_one_line(data: bytes) -> bytes:
    """Return JSON with escapes in place of what a client may take for a line end."""
    for raw, escaped in _LINE_ENDS:
        data = data.replace(raw, escaped)
    return data


class Framing(msgspec.Struct, frozen=True):
    """The bytes around each JSON object of a stream; `done` closes a complete stream of OpenAI's API."""

    content_type: str
    start: bytes
    end: bytes
    done: bytes

    def frame(self, value: Any) -> bytes:
        """Return one line or event that holds `value`."""
        return self.start + encode_line(value) + self.end


SSE = Framing("text/event-stream", b"data: ", b"\n\n", b"data: [DONE]\n\n")
JSON_LINES = Framing("application/jsonlines", b"", b"\n", b"")


def named_event(kind: str, value: Any) -> bytes:
    """Return a server-sent event of this type that holds `value`."""
    return b"event: " + kind.encode() + b"\n" + SSE.frame(value)
