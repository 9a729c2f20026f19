"""Writes the answers of Anthropic's API: one message, or the events of its creation.

A message has a list of blocks: thinking, text, calls of tools. A stream sends an event for each change of a block. Both
kinds of answer build the same blocks; only the stream keeps the events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.generation import Delta, GenerationRequest, ToolCallDelta
from lmi_server.dialects.anthropic.route_names import MESSAGES
from lmi_server.dialects.base import Exchange
from lmi_server.dialects.errors import error_event
from lmi_server.dialects.framing import SSE, encode, encode_line, named_event
from lmi_server.dialects.openai.request import Envelope

Emit = Callable[[str, dict[str, Any]], None]
"""Sends an event, given its type and its fields."""

_PIECE = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
_CALL_PIECE = ("input_json_delta", "partial_json")


class _Blocks:
    """Turns deltas into blocks, and emits an event for each change. At most one block is open, the last one."""

    def __init__(self, identity: str, one_call: bool, emit: Emit) -> None:
        self.blocks: list[dict[str, Any]] = []
        self.kind = ""  # of the open block; "" if none is open
        self.last_call_is_whole = False
        self._identity = identity
        self._one_call = one_call
        self._emit = emit
        self._pieces: list[str] = []  # of the open block
        self._call_index = -1
        self._held: list[str] = []  # text that came inside a call; it follows the call

    @property
    def index(self) -> int:
        """The place of the last block."""
        return len(self.blocks) - 1

    def add(self, delta: Delta) -> None:
        if delta.reasoning:
            self._add_text("thinking", {"thinking": "", "signature": ""}, delta.reasoning)
        if delta.text and self.kind == "tool_use":
            self._held.append(delta.text)
        elif delta.text:
            self._add_text("text", {"text": ""}, delta.text)
        for call in delta.tool_calls:
            if not self._one_call or call.index == 0:
                self._add_call(call)
        if delta.finish_reason is not None:
            self._close()

    def _add_text(self, kind: str, empty: dict[str, Any], text: str) -> None:
        if self.kind != kind:
            self._close()
            self._open({"type": kind, **empty})
        self._add_piece(*_PIECE[kind], text)

    def _add_call(self, call: ToolCallDelta) -> None:
        if self.kind != "tool_use" or call.index != self._call_index:
            self._close()
            self._call_index = call.index
            self._open({"type": "tool_use", "id": call.id or "", "name": call.name or "", "input": {}})
        if call.arguments:
            self._add_piece(*_CALL_PIECE, call.arguments)

    def _open(self, block: dict[str, Any]) -> None:
        self.blocks.append(block)
        self.kind = block["type"]
        self._emit("content_block_start", {"index": self.index, "content_block": block})

    def _add_piece(self, kind: str, key: str, piece: str) -> None:
        self._pieces.append(piece)
        self._emit("content_block_delta", {"index": self.index, "delta": {"type": kind, key: piece}})

    def _close(self) -> None:
        if not self.kind:
            return
        block, whole = self.blocks[-1], "".join(self._pieces)
        if self.kind == "tool_use":
            block["input"], self.last_call_is_whole = _input(whole)
        else:
            block[self.kind] = whole
        if self.kind == "thinking":  # clients send it back with the block; it is not checked here
            block["signature"] = self._identity
            self._emit(
                "content_block_delta",
                {"index": self.index, "delta": {"type": "signature_delta", "signature": self._identity}},
            )
        self._emit("content_block_stop", {"index": self.index})
        self.kind = ""
        self._pieces.clear()
        held = "".join(self._held)
        self._held.clear()
        if held.strip():  # the API has no blocks of white space, such as line ends between two calls
            self._add_text("text", {"text": ""}, held)
            self._close()


def _input(arguments: str) -> tuple[dict[str, Any], bool]:
    """Return the arguments of a call, and whether they are whole.

    Cut off ones are under the key that Anthropic's documentation names for invalid JSON.
    """
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = None
    return (value, True) if isinstance(value, dict) else ({"INVALID_JSON": arguments}, False)


class _Message(Exchange):
    """What whole answers and streams share."""

    def __init__(
        self, generation: GenerationRequest, envelope: Envelope, warnings: tuple[str, ...], request_id: str
    ) -> None:
        """`request_id` identifies the HTTP request."""
        self.requests = (generation,)
        self.warnings = warnings
        self._envelope = envelope
        self._request_id = request_id
        self._blocks = _Blocks(envelope.id, not generation.chat.parallel_tool_calls, self._emit)
        self._last: Delta | None = None

    def _emit(self, kind: str, event: dict[str, Any]) -> None:
        """Send an event; a whole answer has none, so this does nothing."""

    def error_chunk(self, error: LmiServerError) -> bytes:
        return error_event(MESSAGES, self.content_type, error, self._request_id)

    def _object(self, content: list[dict[str, Any]], usage: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._envelope.id,
            "type": "message",
            "role": "assistant",
            "model": self._envelope.model,
            "content": content,
            **end,
            "usage": usage,
        }

    def _end(self, last: Delta) -> dict[str, Any]:
        """Return why the message ended, and the stop sequence that ended it."""
        called = any(block["type"] == "tool_use" for block in self._blocks.blocks)
        reason, sequence = "end_turn", None
        if last.finish_reason == "length":
            reason = "max_tokens"
        elif called and self._blocks.last_call_is_whole:
            reason = "tool_use"
        elif isinstance(last.stop_reason, str):  # also one that cut a call off, which must not run
            reason, sequence = "stop_sequence", last.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(last: Delta) -> dict[str, Any]:
    """Return the counts. `input_tokens` leaves out the tokens from the cache, which have a count of their own."""
    usage = last.usage
    if usage is None:
        return _counts(0, 0, 0)
    counts = _counts(usage.prompt_tokens - usage.cached_tokens, usage.cached_tokens, usage.completion_tokens)
    if usage.reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts


def _counts(computed: int, cached: int, output: int) -> dict[str, Any]:
    return {
        "input_tokens": computed,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


class MessageBody(_Message):
    """A whole message."""

    def add(self, index: int, delta: Delta) -> bytes:
        self._blocks.add(delta)
        if delta.finish_reason is not None:
            self._last = delta
        return b""

    def body(self) -> bytes:
        assert self._last is not None
        return encode(self._object(self._blocks.blocks, _usage(self._last), self._end(self._last)))


class MessageStream(_Message):
    """The events of a message, from `message_start` to `message_stop`.

    The first one waits for the first delta, which says how long the prompt is.
    """

    stream = True
    content_type = SSE.content_type

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._events: list[bytes] = []
        self._started = False
        self._before_text = b""  # what precedes the text in an event of the open block; b"" if it is no text block

    def _emit(self, kind: str, event: dict[str, Any]) -> None:
        self._events.append(_event(kind, event))

    def add(self, index: int, delta: Delta) -> bytes:
        # Most deltas are text for a block that is open, and differ in nothing else.
        if self._before_text and delta.finish_reason is None and not (delta.reasoning or delta.tool_calls):
            return self._before_text + encode_line(delta.text) + _AFTER_TEXT if delta.text else b""
        if not self._started:
            self._start(delta)
        self._blocks.add(delta)
        self._before_text = _before_text(self._blocks.index) if self._blocks.kind == "text" else b""
        if delta.finish_reason is not None:
            self._emit("message_delta", {"delta": self._end(delta), "usage": _usage(delta)})
        data = b"".join(self._events)
        self._events.clear()
        return data

    def last(self) -> bytes:
        return _event("message_stop", {})

    def _start(self, first: Delta) -> None:
        self._started = True
        counts = _counts(len(first.prompt_token_ids or ()), 0, 0)
        empty = self._object([], counts, {"stop_reason": None, "stop_sequence": None})
        self._emit("message_start", {"message": empty})
        self._emit("ping", {})


def _event(kind: str, event: dict[str, Any]) -> bytes:
    return named_event(kind, {"type": kind, **event})


def _before_text(index: int) -> bytes:
    whole = _event("content_block_delta", {"index": index, "delta": {"type": "text_delta", "text": ""}})
    before, mark, after = whole.rpartition(b'""')
    assert mark
    assert after == _AFTER_TEXT, "the text is the last value of its event"
    return before


_AFTER_TEXT = b"}}\n\n"


def count_body(tokens: int) -> bytes:
    """Return the answer of /v1/messages/count_tokens."""
    return encode({"input_tokens": tokens})
