"""How JSON objects become the lines of a stream."""

from __future__ import annotations

from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode

# Legal inside a JSON string, yet line ends to readers that split a stream like Python's str.splitlines does.
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def encode_line(value: Any) -> bytes:
    """Return `value` as JSON that no reader takes for more than one line."""
    data = encode(value)
    if data.isascii():
        return data
    for raw, escaped in _LINE_ENDS:
        data = data.replace(raw, escaped)
    return data


class Framing(msgspec.Struct, frozen=True):
    """What stands around each JSON object of a stream, and what closes a complete OpenAI stream."""

    content_type: str
    start: bytes
    end: bytes
    done: bytes

    def frame(self, value: Any) -> bytes:
        return self.start + encode_line(value) + self.end


SSE = Framing("text/event-stream", b"data: ", b"\n\n", b"data: [DONE]\n\n")
JSON_LINES = Framing("application/jsonlines", b"", b"\n", b"")
