"""OpenAI's dialect: completions and chat completions, with the extra sampling parameters that vLLM takes.

On /invocations the same bodies are taken as LMI takes them: `option.output_formatter` may choose the form of a chat's
answer, and a `model` that is not served is only a warning.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType

from lmi_server.dialects import fields
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.errors import error_event
from lmi_server.dialects.fields import Field
from lmi_server.dialects.framing import JSON_LINES, SSE, Framing, encode, encode_line
from lmi_server.dialects.lmi import formatter_warnings
from lmi_server.errors import LmiServerError, ModelNotFoundError, RequestError
from lmi_server.generation import Delta, FinishReason, GenerationRequest, SamplingParameters, Token, TopToken, Usage
from lmi_server.protocol import Input

_ROUTES = frozenset({"completions", "chat/completions"})
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_FINISH: dict[FinishReason, str] = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}
_MAX_PROMPTS = 2048
_LEAST_LOGPROB = -9999.0  # what OpenAI reports where there is no finite number


# --- fields ---


def _stream_options(name: str, value: Any) -> bool:
    if not isinstance(value, dict):
        raise fields.not_allowed(name, value, 'send an object such as {"include_usage": true}')
    include_usage = value.get("include_usage")
    return False if include_usage is None else fields.boolean(f"{name}.include_usage", include_usage)


def _no_call(name: str, value: Any) -> None:
    if value not in ("none", "auto"):
        raise RequestError(f"{name} is not supported; leave it out: this handler does not call tools yet")


def _only_text(name: str, value: Any) -> None:
    if value != ["text"]:
        raise fields.not_allowed(name, value, 'send ["text"] or leave it out')


def _prompts(name: str, value: Any) -> list[str | tuple[int, ...]]:
    """Read a prompt in any of its four forms: text, list of texts, token ids, list of lists of token ids."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > _MAX_PROMPTS:
            raise fields.not_allowed(name, value, f"send at most {_MAX_PROMPTS} prompts in one request")
        return [_prompt(f"{name}[{index}]", item, type(value[0])) for index, item in enumerate(value)]
    return [_prompt(name, value, type(value))]


def _prompt(name: str, value: Any, kind: type) -> str | tuple[int, ...]:
    if not isinstance(value, (str, list)) or not value or type(value) is not kind:
        raise fields.not_allowed(name, value, "send prompts that are not empty, all texts or all lists of token ids")
    return value if isinstance(value, str) else fields.token_ids(name, value)


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


_ONE_CHOICE = fields.one("send 1 or leave it out: one choice is generated per prompt")
_NO_TOOLS = fields.off("leave it out: this handler does not call tools yet")
_UNCONSTRAINED = fields.off("leave it out: the output is not constrained by a grammar or schema")
_UNSUPPORTED = fields.off("leave it out")

_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "reasoning_effort",
    "verbosity",
    "parallel_tool_calls",
)

_SHARED: dict[str, Field] = {
    "model": Field("model", fields.string),
    "stream": Field("stream", fields.boolean),
    "stream_options": Field("include_usage", _stream_options),
    "max_tokens": Field("max_tokens", fields.MAX_TOKENS),
    "temperature": Field("temperature", fields.TEMPERATURE),
    "top_p": Field("top_p", fields.PROBABILITY),
    "top_k": Field("top_k", fields.top_k),
    "min_p": Field("min_p", fields.MIN_P),
    "typical_p": Field("typical_p", fields.PROBABILITY),
    "presence_penalty": Field("presence_penalty", fields.PENALTY),
    "frequency_penalty": Field("frequency_penalty", fields.PENALTY),
    "repetition_penalty": Field("repetition_penalty", fields.REPETITION),
    "logit_bias": Field("logit_bias", fields.logit_bias),
    "seed": Field("seed", fields.SEED),
    "stop": Field("stop", fields.stop_strings),
    "stop_token_ids": Field("stop_token_ids", fields.token_ids),
    "include_stop_str_in_output": Field("include_stop_str_in_output", fields.boolean),
    "ignore_eos": Field("ignore_eos", fields.boolean),
    "skip_special_tokens": Field("skip_special_tokens", fields.boolean),
    "truncate_prompt_tokens": Field("truncate", fields.MAX_TOKENS),
    "n": Field(None, _ONE_CHOICE),
    "best_of": Field(None, _ONE_CHOICE),
    "response_format": Field(None, fields.plain_text_format),
    "guided_json": Field(None, _UNCONSTRAINED),
    "guided_regex": Field(None, _UNCONSTRAINED),
    "guided_choice": Field(None, _UNCONSTRAINED),
    "guided_grammar": Field(None, _UNCONSTRAINED),
    "structured_outputs": Field(None, _UNCONSTRAINED),
    "use_beam_search": Field(None, _UNSUPPORTED),
    "min_tokens": Field(None, _UNSUPPORTED),
    "bad_words": Field(None, _UNSUPPORTED),
    "allowed_token_ids": Field(None, _UNSUPPORTED),
    "prompt_logprobs": Field(None, _UNSUPPORTED),
    "adapters": Field(None, fields.off("leave it out: this model is served without adapters")),
    **{name: Field(None, fields.ignored) for name in _IGNORED},
}
COMPLETION_FIELDS: dict[str, Field] = {
    **_SHARED,
    "prompt": Field("prompts", _prompts),
    "echo": Field("echo", fields.boolean),
    "logprobs": Field("logprobs", fields.LOGPROBS),
    "add_special_tokens": Field("add_special_tokens", fields.boolean),
    "suffix": Field(None, fields.off("leave it out: the model does not fill in text")),
    "prompt_embeds": Field(None, _UNSUPPORTED),
}
CHAT_FIELDS: dict[str, Field] = {
    **_SHARED,
    "messages": Field("messages", _messages),
    "max_completion_tokens": Field("max_completion_tokens", fields.MAX_TOKENS),
    "logprobs": Field("logprobs", fields.boolean),
    "top_logprobs": Field("top_logprobs", fields.LOGPROBS),
    "tools": Field(None, _NO_TOOLS),
    "functions": Field(None, _NO_TOOLS),
    "tool_choice": Field(None, _no_call),
    "function_call": Field(None, _no_call),
    "modalities": Field(None, _only_text),
    "audio": Field(None, _UNSUPPORTED),
    "web_search_options": Field(None, _UNSUPPORTED),
    "documents": Field(None, _UNSUPPORTED),
    "chat_template": Field(None, fields.off("leave it out: the tokenizer's chat template is used")),
    "chat_template_kwargs": Field(None, _UNSUPPORTED),
    "continue_final_message": Field(None, _UNSUPPORTED),
    "echo": Field(None, _UNSUPPORTED),
}


# --- parse ---


class _Envelope(msgspec.Struct, frozen=True):
    """What every object of an answer repeats."""

    id: str
    created: int
    model: str


def parse_completion(request: Input, body: dict[str, Any], served: ServedModel) -> Exchange:
    """Parse a body of /v1/completions: one sequence, and one choice, for each prompt. Raises RequestError."""
    values, warnings = _read(request, body, COMPLETION_FIELDS, served)
    prompts = values.pop("prompts", None)
    if prompts is None:
        raise RequestError("prompt is missing; send a string, a list of strings or a list of token ids")
    envelope = _envelope("cmpl", values, served)
    stream, include_usage = values.pop("stream", False), values.pop("include_usage", False)
    echo, special = values.pop("echo", False), values.pop("add_special_tokens", True)
    sampling = _sampling(values, values.pop("max_tokens", 16), echo and "logprobs" in values)
    priority = fields.priority(request)
    requests = tuple(
        GenerationRequest(
            request_id=f"{envelope.id}-{index}",
            prompt=prompt,
            sampling=sampling,
            add_special_tokens=special,
            priority=priority,
        )
        for index, prompt in enumerate(prompts)
    )
    if stream:
        return CompletionStream(requests, envelope, warnings, echo, include_usage)
    return CompletionBody(requests, envelope, warnings, echo)


def parse_chat(request: Input, body: dict[str, Any], served: ServedModel) -> Exchange:
    """Parse a body of /v1/chat/completions. Raises RequestError."""
    values, warnings = _read(request, body, CHAT_FIELDS, served)
    messages = values.pop("messages", None)
    if messages is None:
        raise RequestError('messages is missing; send a list such as [{"role": "user", "content": "Hello"}]')
    envelope = _envelope("chatcmpl", values, served)
    framing, ignored_formatter = _chat_framing(request, served, values.pop("stream", False))
    include_usage = values.pop("include_usage", False)
    max_tokens = values.pop("max_tokens", None)
    _set_chat_logprobs(values)
    generation = GenerationRequest(
        request_id=envelope.id,
        prompt=None,
        messages=messages,
        sampling=_sampling(values, values.pop("max_completion_tokens", max_tokens), False),
        priority=fields.priority(request),
    )
    warnings += ignored_formatter
    if framing is None:
        return ChatBody(generation, envelope, warnings)
    return ChatStream(generation, envelope, warnings, framing, include_usage)


def _read(
    request: Input, body: dict[str, Any], known: dict[str, Field], served: ServedModel
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the body's fields and the warnings."""
    values, unknown = fields.read_fields(body, known)
    if values.get("include_usage") is not None and not values.get("stream"):
        raise RequestError("stream_options is only allowed with stream; send stream: true or leave it out")
    warnings = fields.unknown_warnings(unknown, known)
    model = values.get("model")
    if model is None or model == served.name or model in served.served_names:
        return values, warnings
    del values["model"]
    return values, (*warnings, _other_model(request, model, served))


def _other_model(request: Input, model: str, served: ServedModel) -> str:
    """Return the warning on a model that is not served here; OpenAI's routes refuse it."""
    names = ", ".join(dict.fromkeys((*served.served_names, served.name)))
    if request.route in _ROUTES:
        raise ModelNotFoundError(f"The model {fields.show(model)} does not exist; served here: {names}")
    return f"model {fields.show(model)} is ignored; served here: {names}"


def _envelope(prefix: str, values: dict[str, Any], served: ServedModel) -> _Envelope:
    default = served.served_names[0] if served.served_names else served.name
    return _Envelope(f"{prefix}-{uuid4().hex}", int(time.time()), values.pop("model", default))


def _chat_framing(request: Input, served: ServedModel, stream: bool) -> tuple[Framing | None, tuple[str, ...]]:
    """Return the framing of the stream, None for one JSON object. OpenAI's own routes know no option."""
    by_stream = SSE if stream else None
    if request.route in _ROUTES:
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


def _set_chat_logprobs(values: dict[str, Any]) -> None:
    """Turn chat's `logprobs` and `top_logprobs` into the number of alternatives."""
    asked, top = values.pop("logprobs", False), values.pop("top_logprobs", None)
    if asked:
        values["logprobs"] = top or 0
    elif top:
        raise fields.not_allowed("top_logprobs", top, "send logprobs: true with it")


def _sampling(values: dict[str, Any], max_tokens: int | None, prompt_logprobs: bool) -> SamplingParameters:
    values.setdefault("temperature", 1.0)
    return SamplingParameters(
        max_new_tokens=max_tokens,
        do_sample=values["temperature"] > 0,
        prompt_logprobs=prompt_logprobs,
        **values,
    )


# --- the objects of an answer ---


class _Cached(msgspec.Struct):
    cached_tokens: int


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _Cached


class _TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class _TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[_TopLogprob]


class _ChatLogprobs(msgspec.Struct):
    content: list[_TokenLogprob]


class _Message(msgspec.Struct):
    role: str
    content: str


class _Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class _ChatChoice(msgspec.Struct):
    index: int
    message: _Message
    logprobs: _ChatLogprobs | None
    finish_reason: str | None


class _ChunkChoice(msgspec.Struct):
    index: int
    delta: _Delta
    logprobs: _ChatLogprobs | None
    finish_reason: str | None


class _CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: _CompletionLogprobs | None
    finish_reason: str | None


_Choice = _ChatChoice | _ChunkChoice | _CompletionChoice


class _Object(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: Sequence[_Choice]
    usage: _Usage | UnsetType | None = UNSET


def _object(kind: str, envelope: _Envelope, choices: Sequence[_Choice]) -> _Object:
    return _Object(envelope.id, kind, envelope.created, envelope.model, choices)


def _usage(usages: list[Usage]) -> _Usage:
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    return _Usage(prompt, completion, prompt + completion, _Cached(cached))


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and logprob > _LEAST_LOGPROB else _LEAST_LOGPROB  # NaN compares false


def _chat_logprobs(tokens: Sequence[Token], alternatives: int) -> _ChatLogprobs:
    return _ChatLogprobs([_token_logprob(token, alternatives) for token in tokens])


def _token_logprob(token: Token, alternatives: int) -> _TokenLogprob:
    top = [_TopLogprob(top.text, _finite(top.logprob), list(top.text.encode())) for top in token.top[:alternatives]]
    return _TokenLogprob(token.text, _finite(token.logprob), list(token.text.encode()), top)


def _completion_logprobs(tokens: Sequence[Token], alternatives: int, offset: int) -> _CompletionLogprobs:
    """`offset` is that of the first token, in characters of the tokens' texts from the choice's beginning."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return _CompletionLogprobs(
        [token.text for token in tokens],
        [None if token.logprob is None else _finite(token.logprob) for token in tokens],
        [_top_by_text(token, token.top[:alternatives]) for token in tokens],
        offsets,
    )


def _top_by_text(token: Token, top: Sequence[TopToken]) -> dict[str, float] | None:
    """Return the alternatives with the chosen token among them; None for a first prompt token, which was not chosen."""
    if token.logprob is None:
        return None
    return {**{found.text: _finite(found.logprob) for found in top}, token.text: _finite(token.logprob)}


# --- format: chat ---


class _OpenAIExchange(Exchange):
    """What the four kinds of answer share."""

    def __init__(self, requests: tuple[GenerationRequest, ...], envelope: _Envelope, warnings: tuple[str, ...]) -> None:
        self.requests = requests
        self.warnings = warnings
        self._envelope = envelope
        self._alternatives = requests[0].sampling.logprobs
        self._usages: list[Usage] = []

    def error_chunk(self, error: LmiServerError) -> bytes:
        return error_event("completions", self.content_type, error)


class ChatBody(_OpenAIExchange):
    """A whole chat completion."""

    stream = False
    content_type = "application/json"

    def __init__(self, request: GenerationRequest, envelope: _Envelope, warnings: tuple[str, ...]) -> None:
        super().__init__((request,), envelope, warnings)
        self._texts: list[str] = []
        self._tokens: list[Token] = []
        self._finish_reason: str | None = None

    def add(self, index: int, delta: Delta) -> bytes:
        self._texts.append(delta.text)
        if self._alternatives is not None:
            self._tokens += delta.tokens
        if delta.finish_reason is not None:
            self._finish_reason = _FINISH[delta.finish_reason]
        if delta.usage is not None:
            self._usages.append(delta.usage)
        return b""

    def body(self) -> bytes:
        logprobs = None if self._alternatives is None else _chat_logprobs(self._tokens, self._alternatives)
        choice = _ChatChoice(0, _Message("assistant", "".join(self._texts)), logprobs, self._finish_reason)
        answer = _object("chat.completion", self._envelope, [choice])
        answer.usage = _usage(self._usages)
        return encode(answer)


class _Chunks:
    """Writes the chunks of a stream; those of plain text are put together from bytes that never change.

    Tens of thousands of them are written per second.
    """

    def __init__(self, kind: str, envelope: _Envelope, framing: Framing, include_usage: bool) -> None:
        self._kind = kind
        self._envelope = envelope
        self._framing = framing
        self._include_usage = include_usage

    def write(self, choice: _Choice) -> bytes:
        chunk = _object(self._kind, self._envelope, [choice])
        if self._include_usage:
            chunk.usage = None
        return self._framing.frame(chunk)

    def around_text(self, choice: _ChunkChoice | _CompletionChoice) -> tuple[bytes, bytes]:
        """Return what stands before and after the text of a chunk with this choice, whose text is empty."""
        before, mark, after = self.write(choice).rpartition(b'""')
        assert mark, "the choice's text is the last empty string of its chunk"
        return before, after

    def end(self, usages: list[Usage]) -> bytes:
        if not self._include_usage:
            return self._framing.done
        chunk = _object(self._kind, self._envelope, [])
        chunk.usage = _usage(usages)
        return self._framing.frame(chunk) + self._framing.done


class ChatStream(_OpenAIExchange):
    """The chunks of a chat completion: the role, the contents, the finish reason, the usage where asked for."""

    stream = True

    def __init__(
        self,
        request: GenerationRequest,
        envelope: _Envelope,
        warnings: tuple[str, ...],
        framing: Framing,
        include_usage: bool,
    ) -> None:
        super().__init__((request,), envelope, warnings)
        self.content_type = framing.content_type
        self._chunks = _Chunks("chat.completion.chunk", envelope, framing, include_usage)
        self._before, self._after = self._chunks.around_text(_ChunkChoice(0, _Delta(content=""), None, None))

    def first(self) -> bytes:
        return self._chunks.write(_ChunkChoice(0, _Delta("assistant", ""), None, None))

    def add(self, index: int, delta: Delta) -> bytes:
        if self._alternatives is not None and delta.tokens:
            logprobs = _chat_logprobs(delta.tokens, self._alternatives)
            content = self._chunks.write(_ChunkChoice(0, _Delta(content=delta.text), logprobs, None))
        elif delta.text:
            content = self._before + encode_line(delta.text) + self._after
        else:
            content = b""
        return content if delta.finish_reason is None else content + self._finish(delta.finish_reason, delta.usage)

    def _finish(self, reason: FinishReason, usage: Usage | None) -> bytes:
        if usage is not None:
            self._usages.append(usage)
        return self._chunks.write(_ChunkChoice(0, _Delta(), None, _FINISH[reason]))

    def last(self) -> bytes:
        return self._chunks.end(self._usages)


# --- format: completions ---


class _Progress:
    """How far one choice of a completion is."""

    def __init__(self, request: GenerationRequest, echo: bool) -> None:
        self._prompt = request.prompt
        self._alternatives = request.sampling.logprobs
        self._echo = echo  # until the prompt was taken
        self._offset = 0

    def take(self, delta: Delta) -> tuple[str, tuple[Token, ...]]:
        """Return the text and the tokens that `delta` adds; with echo the prompt's come before the first ones."""
        if not self._echo:
            return delta.text, delta.tokens
        self._echo = False
        prompt = self._prompt if isinstance(self._prompt, str) else delta.prompt_text or ""
        return prompt + delta.text, (delta.prompt_tokens or ()) + delta.tokens

    def logprobs(self, tokens: Sequence[Token]) -> _CompletionLogprobs | None:
        if self._alternatives is None:
            return None
        logprobs = _completion_logprobs(tokens, self._alternatives, self._offset)
        self._offset += sum(len(token.text) for token in tokens)
        return logprobs


class CompletionBody(_OpenAIExchange):
    """A whole completion, with a choice for each prompt."""

    stream = False
    content_type = "application/json"

    def __init__(
        self, requests: tuple[GenerationRequest, ...], envelope: _Envelope, warnings: tuple[str, ...], echo: bool
    ) -> None:
        super().__init__(requests, envelope, warnings)
        self._progress = [_Progress(request, echo) for request in requests]
        self._texts: list[list[str]] = [[] for _ in requests]
        self._tokens: list[list[Token]] = [[] for _ in requests]
        self._finish_reasons: list[str | None] = [None for _ in requests]

    def add(self, index: int, delta: Delta) -> bytes:
        text, tokens = self._progress[index].take(delta)
        self._texts[index].append(text)
        if self._alternatives is not None:
            self._tokens[index] += tokens
        if delta.finish_reason is not None:
            self._finish_reasons[index] = _FINISH[delta.finish_reason]
        if delta.usage is not None:
            self._usages.append(delta.usage)
        return b""

    def body(self) -> bytes:
        choices = [
            _CompletionChoice(index, "".join(texts), progress.logprobs(tokens), reason)
            for index, (texts, tokens, progress, reason) in enumerate(
                zip(self._texts, self._tokens, self._progress, self._finish_reasons, strict=True)
            )
        ]
        answer = _object("text_completion", self._envelope, choices)
        answer.usage = _usage(self._usages)
        return encode(answer)


class CompletionStream(_OpenAIExchange):
    """The chunks of a completion; each choice's last one has its finish reason."""

    stream = True
    content_type = SSE.content_type

    def __init__(
        self,
        requests: tuple[GenerationRequest, ...],
        envelope: _Envelope,
        warnings: tuple[str, ...],
        echo: bool,
        include_usage: bool,
    ) -> None:
        super().__init__(requests, envelope, warnings)
        self._progress = [_Progress(request, echo) for request in requests]
        self._chunks = _Chunks("text_completion", envelope, SSE, include_usage)
        self._around = [self._chunks.around_text(_CompletionChoice(i, "", None, None)) for i in range(len(requests))]

    def add(self, index: int, delta: Delta) -> bytes:
        text, tokens = self._progress[index].take(delta)
        if delta.finish_reason is None and self._alternatives is None:
            before, after = self._around[index]
            return before + encode_line(text) + after if text else b""
        if delta.finish_reason is None and not text and not tokens:
            return b""
        if delta.usage is not None:
            self._usages.append(delta.usage)
        logprobs = self._progress[index].logprobs(tokens)
        reason = None if delta.finish_reason is None else _FINISH[delta.finish_reason]
        return self._chunks.write(_CompletionChoice(index, text, logprobs, reason))

    def last(self) -> bytes:
        return self._chunks.end(self._usages)
