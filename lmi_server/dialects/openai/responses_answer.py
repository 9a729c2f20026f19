"""Writes the answers of OpenAI's responses: one object, or the events of its creation.

A response has a list of output items: reasoning, messages, function calls. A stream sends an event for each change of
an item. Both kinds of answer build the same items; only the stream keeps the events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from lmi_server.contract.generation import Delta, GenerationRequest, Token, ToolCallDelta
from lmi_server.dialects.base import Exchange
from lmi_server.dialects.framing import SSE, encode, named_event
from lmi_server.dialects.openai.answer import finite
from lmi_server.dialects.openai.request import Envelope
from lmi_server.dialects.routes import RESPONSES

ItemT = TypeVar("ItemT", bound="_Item")
Emit = Callable[[str, dict[str, Any]], None]
"""Sends an event, given its type and its fields."""


class RequestEcho(NamedTuple):
    """The fields of the request that the answer repeats, and the choice of its log probabilities."""

    body: dict[str, Any]
    instructions: str | None
    max_output_tokens: int | None
    alternatives: int | None  # per token, None for no log probabilities


class _Item:
    """An open item of the output. `value` is its JSON object, up to date at any time."""

    def __init__(self, value: dict[str, Any], index: int, emit: Emit) -> None:
        self.value = value
        self._where = {"item_id": value["id"], "output_index": index}
        self._emit = emit
        emit("response.output_item.added", {"output_index": index, "item": value})

    def close(self, status: str) -> None:
        self.value["status"] = status
        self._emit("response.output_item.done", {"output_index": self._where["output_index"], "item": self.value})


class _TextItem(_Item):
    """A message or reasoning: an item with one part, a text. `kind` is the middle of its event types."""

    def __init__(self, value: dict[str, Any], part: dict[str, Any], kind: str, index: int, emit: Emit) -> None:
        super().__init__(value, index, emit)
        self._part = part
        self._kind = kind
        self._texts: list[str] = []
        self._where["content_index"] = 0
        emit("response.content_part.added", self._where | {"part": part})

    def add(self, text: str, logprobs: list[dict[str, Any]] | None) -> None:
        self._texts.append(text)
        event: dict[str, Any] = {**self._where, "delta": text}
        if logprobs is not None:
            event["logprobs"] = logprobs
            self._part["logprobs"] += logprobs
        self._emit(f"response.{self._kind}.delta", event)

    def close(self, status: str) -> None:
        self._part["text"] = "".join(self._texts)
        event = {"text": self._part["text"]}
        if "logprobs" in self._part:
            event["logprobs"] = self._part["logprobs"]
        self._emit(f"response.{self._kind}.done", self._where | event)
        self._emit("response.content_part.done", self._where | {"part": self._part})
        self.value["content"] = [self._part]
        super().close(status)


class _CallItem(_Item):
    """A function call."""

    def add(self, arguments: str) -> None:
        self.value["arguments"] += arguments
        self._emit("response.function_call_arguments.delta", self._where | {"delta": arguments})

    def close(self, status: str) -> None:
        event = {"arguments": self.value["arguments"], "name": self.value["name"]}
        self._emit("response.function_call_arguments.done", self._where | event)
        super().close(status)


class _Output:
    """Turns deltas into output items, and emits an event for each change.

    At most one item is open. A delta of another kind closes it and opens the next.
    """

    def __init__(self, identity: str, echo: RequestEcho, one_call: bool, emit: Emit) -> None:
        self.items: list[dict[str, Any]] = []
        self._identity = identity
        self._echo = echo
        self._one_call = one_call
        self._emit = emit
        self._open: _Item | None = None
        self._call_index = -1

    def add(self, delta: Delta) -> None:
        if delta.reasoning:
            self._text_item("reasoning").add(delta.reasoning, None)
        # A delta may have tokens but no text yet (half a character). Inside a message its log probabilities count.
        if delta.text or (self._echo.alternatives is not None and delta.tokens and self._in_message()):
            self._text_item("message").add(delta.text, self._logprobs(delta.tokens))
        for call in delta.tool_calls:
            if not self._one_call or call.index == 0:
                self._take_call(call)
        if delta.finish_reason is not None:
            self._close("incomplete" if delta.finish_reason == "length" else "completed")

    def _in_message(self) -> bool:
        return self._open is not None and self._open.value["type"] == "message"

    def _text_item(self, kind: str) -> _TextItem:
        if isinstance(self._open, _TextItem) and self._open.value["type"] == kind:
            return self._open
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            value = {"id": self._next_id("msg"), "type": kind, "role": "assistant", "content": []}
            events = "output_text"
        else:
            part = {"type": "reasoning_text", "text": ""}
            value = {"id": self._next_id("rs"), "type": kind, "summary": [], "content": []}
            events = "reasoning_text"
        return self._begin(_TextItem(self._append(value), part, events, len(self.items) - 1, self._emit))

    def _take_call(self, call: ToolCallDelta) -> None:
        if not isinstance(self._open, _CallItem) or call.index != self._call_index:
            value = {"id": self._next_id("fc"), "type": "function_call", "call_id": call.id or ""}
            value |= {"name": call.name or "", "arguments": ""}
            self._call_index = call.index
            self._begin(_CallItem(self._append(value), len(self.items) - 1, self._emit))
        assert isinstance(self._open, _CallItem)
        if call.arguments:
            self._open.add(call.arguments)

    def _append(self, value: dict[str, Any]) -> dict[str, Any]:
        self._close("completed")
        value["status"] = "in_progress"
        self.items.append(value)
        return value

    def _begin(self, item: ItemT) -> ItemT:
        self._open = item
        return item

    def _close(self, status: str) -> None:
        if self._open is not None:
            self._open.close(status)
            self._open = None

    def _next_id(self, prefix: str) -> str:
        return f"{prefix}_{self._identity}_{len(self.items)}"

    def _logprobs(self, tokens: tuple[Token, ...]) -> list[dict[str, Any]]:
        if self._echo.alternatives is None:
            return []
        return [
            {
                "token": token.text,
                "logprob": finite(token.logprob),
                "bytes": list(token.text.encode()),
                "top_logprobs": [
                    {"token": top.text, "logprob": finite(top.logprob), "bytes": list(top.text.encode())}
                    for top in token.top[: self._echo.alternatives]
                ],
            }
            for token in tokens
        ]


class _Response(Exchange):
    """What whole answers and streams share."""

    error_route = RESPONSES

    def __init__(
        self, request: GenerationRequest, envelope: Envelope, warnings: tuple[str, ...], echo: RequestEcho
    ) -> None:
        self.requests = (request,)
        self.warnings = warnings
        self._envelope = envelope
        self._echo = echo
        self._events: list[bytes] = []
        self._count = 0
        one_call = not request.chat.parallel_tool_calls
        self._output = _Output(envelope.id.removeprefix("resp-"), echo, one_call, self._emit)
        self._last: Delta | None = None

    def _emit(self, kind: str, event: dict[str, Any]) -> None:
        """Send an event; a whole answer has none, so this does nothing."""

    def add(self, index: int, delta: Delta) -> bytes:
        self._output.add(delta)
        if delta.finish_reason is not None:
            self._last = delta
        return self._flush()

    def _flush(self) -> bytes:
        data = b"".join(self._events)
        self._events.clear()
        return data

    def _object(self) -> dict[str, Any]:
        """Return the response object in its current state."""
        sampling, chat = self.requests[0].sampling, self.requests[0].chat
        cut = self._last is not None and self._last.finish_reason == "length"
        ended = "incomplete" if cut else "completed"
        return {
            "id": self._envelope.id,
            "object": "response",
            "created_at": self._envelope.created,
            "status": "in_progress" if self._last is None else ended,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": self._echo.instructions,
            "max_output_tokens": self._echo.max_output_tokens,
            "metadata": {},
            "model": self._envelope.model,
            "output": self._output.items,
            "parallel_tool_calls": chat.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage(),
            **self._echo.body,
        }

    def _usage(self) -> dict[str, Any] | None:
        usage = None if self._last is None else self._last.usage
        if usage is None:
            return None
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


class ResponseBody(_Response):
    """A whole response."""

    def body(self) -> bytes:
        return encode(self._object())


class ResponseStream(_Response):
    """The events of a response, from `response.created` to `response.completed` or `response.incomplete`."""

    stream = True
    content_type = SSE.content_type

    def _emit(self, kind: str, event: dict[str, Any]) -> None:
        self._events.append(named_event(kind, {"type": kind, "sequence_number": self._count, **event}))
        self._count += 1

    def first(self) -> bytes:
        for kind in ("response.created", "response.in_progress"):
            self._emit(kind, {"response": self._object()})
        return self._flush()

    def last(self) -> bytes:
        response = self._object()
        self._emit(f"response.{response['status']}", {"response": response})
        return self._events.pop()
