"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from lmi_server.dialects import fields
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.fields import Field
from lmi_server.dialects.framing import JSON_LINES, SSE, Framing, encode, encode_line
from lmi_server.dialects.lmi import formatter_warnings
from lmi_server.dialects.openai.answer import FINISH, Chunks, OpenAIExchange, answer_of, finite, usage_of
from lmi_server.dialects.openai.request import (
    ROUTES,
    SHARED_FIELDS,
    UNSUPPORTED,
    Envelope,
    envelope_of,
    read,
    sampling_of,
)
from lmi_server.errors import RequestError
from lmi_server.generation import Delta, FinishReason, GenerationRequest, Token, Usage
from lmi_server.protocol import Input

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


# --- parse ---


def _no_call(name: str, value: Any) -> None:
    if value not in ("none", "auto"):
        raise RequestError(f"{name} is not supported; leave it out: this handler does not call tools yet")


def _only_text(name: str, value: Any) -> None:
    if value != ["text"]:
        raise fields.not_allowed(name, value, 'send ["text"] or leave it out')


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise fields.not_allowed(name, value, 'send a list such as [{"role": "user", "content": "Hello"}]')
    return [_message(f"{name}[{index}]", message) for index, message in enumerate(value)]


def _message(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise fields.not_allowed(name, value, 'send an object such as {"role": "user", "content": "Hello"}')
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise fields.not_allowed(f"{name}.role", role, f"send one of {', '.join(sorted(_ROLES))}")
    if isinstance(content, str):
        return value
    if content is None and role == "assistant":  # a turn that only called tools
        return {**value, "content": ""}
    if not isinstance(content, list):
        raise fields.not_allowed(f"{name}.content", content, "send a string or a list of text parts")
    # Chat templates of text models expect a string: parts are joined as LMI joins them.
    return {**value, "content": "\n".join([_part(f"{name}.content[{i}]", part) for i, part in enumerate(content)])}


def _part(name: str, value: Any) -> str:
    if not isinstance(value, dict):
        raise fields.not_allowed(name, value, 'send an object such as {"type": "text", "text": "Hello"}')
    if value.get("type") != "text":
        raise fields.not_allowed(f"{name}.type", value.get("type"), 'send "text": the model takes text only')
    return fields.string(f"{name}.text", value.get("text"))


_NO_TOOLS = fields.off("leave it out: this handler does not call tools yet")
CHAT_FIELDS: dict[str, Field] = {
    **SHARED_FIELDS,
    "messages": Field("messages", _messages),
    "max_completion_tokens": Field("max_completion_tokens", fields.MAX_TOKENS),
    "logprobs": Field("logprobs", fields.boolean),
    "top_logprobs": Field("top_logprobs", fields.LOGPROBS),
    "tools": Field(None, _NO_TOOLS),
    "functions": Field(None, _NO_TOOLS),
    "tool_choice": Field(None, _no_call),
    "function_call": Field(None, _no_call),
    "modalities": Field(None, _only_text),
    "audio": Field(None, UNSUPPORTED),
    "web_search_options": Field(None, UNSUPPORTED),
    "documents": Field(None, UNSUPPORTED),
    "chat_template": Field(None, fields.off("leave it out: the tokenizer's chat template is used")),
    "chat_template_kwargs": Field(None, UNSUPPORTED),
    "continue_final_message": Field(None, UNSUPPORTED),
    "echo": Field(None, UNSUPPORTED),
}


def parse_chat(request: Input, body: dict[str, Any], served: ServedModel) -> Exchange:
    """Parse a body of /v1/chat/completions. Raises RequestError."""
    values, warnings = read(request, body, CHAT_FIELDS, served)
    messages = values.pop("messages", None)
    if messages is None:
        raise RequestError('messages is missing; send a list such as [{"role": "user", "content": "Hello"}]')
    envelope = envelope_of("chatcmpl", values, served)
    framing, ignored_formatter = _chat_framing(request, served, values.pop("stream", False))
    include_usage = values.pop("include_usage", False)
    max_tokens = values.pop("max_tokens", None)
    _set_alternatives(values)
    generation = GenerationRequest(
        request_id=envelope.id,
        prompt=None,
        messages=messages,
        sampling=sampling_of(values, values.pop("max_completion_tokens", max_tokens), None),
        priority=fields.priority(request),
    )
    warnings += ignored_formatter
    if framing is None:
        return ChatBody(generation, envelope, warnings)
    return ChatStream(generation, envelope, warnings, framing, include_usage)


def _chat_framing(request: Input, served: ServedModel, stream: bool) -> tuple[Framing | None, tuple[str, ...]]:
    """Return the framing of the stream, None for one JSON object. OpenAI's own routes know no option."""
    by_stream = SSE if stream else None
    if request.route in ROUTES:
        return by_stream, ()
    match served.output_formatter:
        case "json_chat":
            return None, ()
        case "jsonlines_chat":
            return JSON_LINES, ()
        case "sse_chat":
            return SSE, ()
        case name:
            return by_stream, formatter_warnings(name)


def _set_alternatives(values: dict[str, Any]) -> None:
    """Turn chat's `logprobs` and `top_logprobs` into the number of alternatives."""
    asked, top = values.pop("logprobs", False), values.pop("top_logprobs", None)
    if asked:
        values["logprobs"] = top or 0
    elif top:
        raise fields.not_allowed("top_logprobs", top, "send logprobs: true with it")


# --- the objects of an answer ---


class _TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class _TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[_TopLogprob]


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob]


class _Message(msgspec.Struct):
    role: str
    content: str


class _Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class _Choice(msgspec.Struct):
    index: int
    message: _Message
    logprobs: _Logprobs | None
    finish_reason: str | None


class _ChunkChoice(msgspec.Struct):
    index: int
    delta: _Delta
    logprobs: _Logprobs | None
    finish_reason: str | None


def _logprobs(tokens: Sequence[Token], alternatives: int) -> _Logprobs:
    return _Logprobs([_token_logprob(token, alternatives) for token in tokens])


def _token_logprob(token: Token, alternatives: int) -> _TokenLogprob:
    top = [_TopLogprob(top.text, finite(top.logprob), list(top.text.encode())) for top in token.top[:alternatives]]
    return _TokenLogprob(token.text, finite(token.logprob), list(token.text.encode()), top)


# --- format ---


class ChatBody(OpenAIExchange):
    """A whole chat completion."""

    stream = False
    content_type = "application/json"

    def __init__(self, request: GenerationRequest, envelope: Envelope, warnings: tuple[str, ...]) -> None:
        super().__init__((request,), envelope, warnings)
        self._texts: list[str] = []
        self._tokens: list[Token] = []
        self._finish_reason: str | None = None

    def add(self, index: int, delta: Delta) -> bytes:
        self._texts.append(delta.text)
        if self._alternatives is not None:
            self._tokens += delta.tokens
        if delta.finish_reason is not None:
            self._finish_reason = FINISH[delta.finish_reason]
        if delta.usage is not None:
            self._usages.append(delta.usage)
        return b""

    def body(self) -> bytes:
        logprobs = None if self._alternatives is None else _logprobs(self._tokens, self._alternatives)
        choice = _Choice(0, _Message("assistant", "".join(self._texts)), logprobs, self._finish_reason)
        answer = answer_of("chat.completion", self._envelope, [choice])
        answer.usage = usage_of(self._usages)
        return encode(answer)


class ChatStream(OpenAIExchange):
    """The chunks of a chat completion: the role, the contents, the finish reason, the usage where asked for."""

    stream = True

    def __init__(
        self,
        request: GenerationRequest,
        envelope: Envelope,
        warnings: tuple[str, ...],
        framing: Framing,
        include_usage: bool,
    ) -> None:
        super().__init__((request,), envelope, warnings)
        self.content_type = framing.content_type
        self._chunks = Chunks("chat.completion.chunk", envelope, framing, include_usage)
        self._before, self._after = self._chunks.around_text(_ChunkChoice(0, _Delta(content=""), None, None))

    def first(self) -> bytes:
        return self._chunks.write(_ChunkChoice(0, _Delta("assistant", ""), None, None))

    def add(self, index: int, delta: Delta) -> bytes:
        if self._alternatives is not None and delta.tokens:
            logprobs = _logprobs(delta.tokens, self._alternatives)
            content = self._chunks.write(_ChunkChoice(0, _Delta(content=delta.text), logprobs, None))
        elif delta.text:
            content = self._before + encode_line(delta.text) + self._after
        else:
            content = b""
        return content if delta.finish_reason is None else content + self._finish(delta.finish_reason, delta.usage)

    def _finish(self, reason: FinishReason, usage: Usage | None) -> bytes:
        if usage is not None:
            self._usages.append(usage)
        return self._chunks.write(_ChunkChoice(0, _Delta(), None, FINISH[reason]))

    def last(self) -> bytes:
        return self._chunks.end(self._usages)
