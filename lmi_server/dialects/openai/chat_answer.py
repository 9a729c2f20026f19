"""Writes the answers of OpenAI's chat completions: one object, or the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from lmi_server.contract.generation import (
    Delta,
    FinishReason,
    GenerationRequest,
    NamedTool,
    Token,
    ToolCallDelta,
    TopToken,
)
from lmi_server.dialects.framing import Framing, encode, encode_line
from lmi_server.dialects.openai.answer import (
    Chunks,
    OpenAIExchange,
    ParsedOpenAI,
    finite,
    prompt_logprobs,
    token_label,
)
from lmi_server.dialects.openai.request import AnswerOptions
from lmi_server.dialects.parameters.choices import FINISH

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


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct):
    id: str
    type: str
    function: _Function


class _Message(msgspec.Struct):
    role: str
    content: str | None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # DeepSeek's name of the same, which many clients read
    tool_calls: list[_ToolCall] | UnsetType = UNSET


class _FunctionPiece(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class _ToolCallPiece(msgspec.Struct):
    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: _FunctionPiece | UnsetType = UNSET


class _Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[_ToolCallPiece] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class _Choice(msgspec.Struct):
    index: int
    message: _Message
    logprobs: _Logprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class _ChunkChoice(msgspec.Struct):
    index: int
    delta: _Delta
    logprobs: _Logprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


def _logprobs(tokens: Sequence[Token], options: AnswerOptions) -> _Logprobs:
    return _Logprobs([_token_logprob(token, options) for token in tokens])


def _token_logprob(token: Token, options: AnswerOptions) -> _TokenLogprob:
    # As with vLLM, the chosen token comes first, also if it is not one of the most likely.
    ranked: list[Token | TopToken] = [token, *(other for other in token.top if other.id != token.id)]
    top = [_TopLogprob(*_token_fields(other, options)) for other in ranked[: options.alternatives]]
    return _TokenLogprob(*_token_fields(token, options), top)


def _token_fields(token: Token | TopToken, options: AnswerOptions) -> tuple[str, float, list[int]]:
    return token_label(token, options), finite(token.logprob), list(token.text.encode())


def _pieces(calls: Sequence[ToolCallDelta]) -> list[_ToolCallPiece]:
    """Return one piece for each call.

    A delta of several tokens may have both the name of a call and arguments of it. Clients that keep the first list
    of pieces as it is and add to it by index would take two pieces of one call for two calls.
    """
    pieces: dict[int, _ToolCallPiece] = {}
    for call in calls:
        piece = pieces.setdefault(call.index, _ToolCallPiece(call.index))
        if call.id is not None:
            piece.id, piece.type = call.id, "function"
        if call.name is None and call.arguments is None:
            continue
        if piece.function is UNSET:
            piece.function = _FunctionPiece()
        if call.name is not None:
            piece.function.name = call.name
        if call.arguments is not None:
            before = "" if piece.function.arguments is UNSET else piece.function.arguments
            piece.function.arguments = before + call.arguments
    return list(pieces.values())


# --- the answers ---


class _ToolCallRules:
    """The tool calls and the finish reason of a choice; the request decides both."""

    def __init__(self, request: GenerationRequest) -> None:
        self._one_call = not request.chat.parallel_tool_calls
        self._named = isinstance(request.chat.tool_choice, NamedTool)

    def allowed_calls(self, calls: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
        """Return the calls that parallel_tool_calls allows; models may generate more."""
        return [call for call in calls if not self._one_call or call.index == 0]

    def finish(self, reason: FinishReason, called: bool) -> str:
        """Return the finish reason. If the request names the function, OpenAI's is "stop": the model did not choose."""
        finish = FINISH[reason]
        return "tool_calls" if called and finish == "stop" and not self._named else finish


class _CollectedChoice:
    """Collects the deltas of one choice of an answer that is not streamed."""

    def __init__(self, request: GenerationRequest, options: AnswerOptions) -> None:
        self._options = options
        self._rules = _ToolCallRules(request)
        self._keeps_tokens = options.alternatives is not None or options.token_ids
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._tokens: list[Token] = []
        self._calls: dict[int, _ToolCall] = {}
        self._last: Delta | None = None
        self.first: Delta | None = None

    def add(self, delta: Delta) -> None:
        if self.first is None:
            self.first = delta
        self._texts.append(delta.text)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        if delta.tool_calls:
            self._add_calls(delta.tool_calls)
        if self._keeps_tokens:
            self._tokens += delta.tokens
        if delta.finish_reason is not None:
            self._last = delta

    def _add_calls(self, pieces: Sequence[ToolCallDelta]) -> None:
        for piece in self._rules.allowed_calls(pieces):
            call = self._calls.setdefault(piece.index, _ToolCall("", "function", _Function("", "")))
            call.id = piece.id or call.id
            call.function.name += piece.name or ""
            call.function.arguments += piece.arguments or ""

    def choice(self, index: int) -> _Choice:
        assert self._last is not None
        assert self._last.finish_reason is not None
        choice = _Choice(
            index,
            self._message(),
            None if self._options.alternatives is None else _logprobs(self._tokens, self._options),
            self._rules.finish(self._last.finish_reason, bool(self._calls)),
            self._last.stop_reason,
        )
        if self._options.token_ids:
            choice.token_ids = [token.id for token in self._tokens]
        return choice

    def _message(self) -> _Message:
        text = "".join(self._texts)
        # OpenAI writes null, not "", beside tool calls and reasoning.
        message = _Message("assistant", text if text or not (self._calls or self._reasoning) else None)
        if self._reasoning:
            message.reasoning = message.reasoning_content = "".join(self._reasoning)
        if self._calls:
            message.tool_calls = [self._calls[index] for index in sorted(self._calls)]
        return message


class ChatBody(OpenAIExchange):
    """A whole chat completion."""

    def __init__(self, parsed: ParsedOpenAI) -> None:
        super().__init__(parsed, parsed.options.n)
        self._sequences = [_CollectedChoice(request, parsed.options) for request in parsed.requests]

    def add(self, index: int, delta: Delta) -> bytes:
        self._sequences[index].add(delta)
        if delta.usage is not None:
            self._tally.add(index, delta)
        return b""

    def body(self) -> bytes:
        choices = [sequence.choice(index) for index, sequence in enumerate(self._sequences)]
        answer = self._answer("chat.completion", choices)
        first = self._sequences[0].first
        assert first is not None
        if self._options.prompt_alternatives is not None:
            answer.prompt_logprobs = prompt_logprobs(first.prompt_tokens or (), self._options.prompt_alternatives)
        if self._options.token_ids:
            answer.prompt_token_ids = list(first.prompt_token_ids or ())
        return encode(answer)


class ChatStream(OpenAIExchange):
    """The chunks of a chat completion: the role of each choice, its text, its finish reason; then the usage."""

    stream = True

    def __init__(self, parsed: ParsedOpenAI, framing: Framing) -> None:
        options = parsed.options
        super().__init__(parsed, options.n)
        self.content_type = framing.content_type
        self._rules = _ToolCallRules(parsed.requests[0])
        self._called = [False] * options.n
        self._chunks = Chunks("chat.completion.chunk", parsed.envelope, framing, options.include_usage)
        self._around = [
            self._chunks.around_text(_ChunkChoice(index, _Delta(content=""), None, None)) for index in range(options.n)
        ]
        self._text_only = options.text_only
        # If the request asks for the prompt's token ids or for continuous usage, the first chunks carry them. Then they
        # have to wait for the first delta.
        self._opened = self._text_only

    def first(self) -> bytes:
        return self._roles(None) if self._text_only else b""

    def add(self, index: int, delta: Delta) -> bytes:
        # Everything but plain text takes the general way. Most deltas are plain text: see `Chunks.around_text`.
        if not (self._text_only and delta.finish_reason is None) or delta.reasoning or delta.tool_calls:
            return self._chunk(index, delta)
        if not delta.text:
            return b""
        before, after = self._around[index]
        return before + encode_line(delta.text) + after

    def last(self) -> bytes:
        return self._chunks.end(self._tally)

    def _chunk(self, index: int, delta: Delta) -> bytes:
        opening = b"" if self._opened else self._roles(delta)
        self._tally.add(index, delta)
        calls = self._rules.allowed_calls(delta.tool_calls)
        ends = delta.finish_reason is not None
        if not (ends or delta.text or delta.reasoning or calls or (delta.tokens and not self._text_only)):
            return opening
        self._called[index] = self._called[index] or bool(calls)
        choice = _ChunkChoice(index, self._delta(delta, calls), None, None)
        if self._options.alternatives is not None and delta.tokens:
            choice.logprobs = _logprobs(delta.tokens, self._options)
        if self._options.token_ids:
            choice.token_ids = [token.id for token in delta.tokens]
        if delta.finish_reason is not None:
            choice.finish_reason = self._rules.finish(delta.finish_reason, self._called[index])
            choice.stop_reason = delta.stop_reason
        usage = self._tally.so_far(index) if self._options.continuous_usage else None
        return opening + self._chunks.write(choice, usage)

    @staticmethod
    def _delta(delta: Delta, calls: Sequence[ToolCallDelta]) -> _Delta:
        chunk = _Delta()
        if delta.reasoning:
            chunk.reasoning = chunk.reasoning_content = delta.reasoning
        if calls:
            chunk.tool_calls = _pieces(calls)
        if delta.text or not (delta.reasoning or calls):
            chunk.content = delta.text
        return chunk

    def _roles(self, delta: Delta | None) -> bytes:
        """Return the first chunk of each choice. `delta` is the first delta, None if the chunks need nothing of it."""
        self._opened = True
        ids: list[int] | UnsetType = UNSET
        if delta is not None and self._options.token_ids:
            ids = list(delta.prompt_token_ids or ())
        return b"".join(self._role(index, delta, ids) for index in range(len(self.requests)))

    def _role(self, index: int, delta: Delta | None, ids: list[int] | UnsetType) -> bytes:
        usage = None
        if delta is not None and self._options.continuous_usage:
            self._tally.set_prompt(index, len(delta.prompt_token_ids or ()))
            usage = self._tally.so_far(index)
        return self._chunks.write(_ChunkChoice(index, _Delta("assistant", content=""), None, None), usage, ids)
