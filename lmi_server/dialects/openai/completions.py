"""OpenAI's completions: one choice for each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lmi_server.dialects import fields
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.fields import Field
from lmi_server.dialects.framing import SSE, encode, encode_line
from lmi_server.dialects.openai.answer import FINISH, Chunks, OpenAIExchange, answer_of, finite, usage_of
from lmi_server.dialects.openai.request import SHARED_FIELDS, UNSUPPORTED, Envelope, envelope_of, read, sampling_of
from lmi_server.errors import RequestError
from lmi_server.generation import Delta, GenerationRequest, Token, TopToken
from lmi_server.protocol import Input

_MAX_PROMPTS = 2048


# --- parse ---


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


COMPLETION_FIELDS: dict[str, Field] = {
    **SHARED_FIELDS,
    "prompt": Field("prompts", _prompts),
    "echo": Field("echo", fields.boolean),
    "logprobs": Field("logprobs", fields.LOGPROBS),
    "add_special_tokens": Field("add_special_tokens", fields.boolean),
    "suffix": Field(None, fields.off("leave it out: the model does not fill in text")),
    "prompt_embeds": Field(None, UNSUPPORTED),
}


def parse_completion(request: Input, body: dict[str, Any], served: ServedModel) -> Exchange:
    """Parse a body of /v1/completions: one sequence, and one choice, for each prompt. Raises RequestError."""
    values, warnings = read(request, body, COMPLETION_FIELDS, served)
    prompts = values.pop("prompts", None)
    if prompts is None:
        raise RequestError("prompt is missing; send a string, a list of strings or a list of token ids")
    envelope = envelope_of("cmpl", values, served)
    stream, include_usage = values.pop("stream", False), values.pop("include_usage", False)
    echo, special = values.pop("echo", False), values.pop("add_special_tokens", True)
    sampling = sampling_of(values, values.pop("max_tokens", 16), values.get("logprobs") if echo else None)
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


# --- the objects of an answer ---


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _Choice(msgspec.Struct):
    index: int
    text: str
    logprobs: _Logprobs | None
    finish_reason: str | None


def _logprobs(tokens: Sequence[Token], alternatives: int, offset: int) -> _Logprobs:
    """`offset` is that of the first token, in characters of the tokens' texts from the choice's beginning."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return _Logprobs(
        [token.text for token in tokens],
        [None if token.logprob is None else finite(token.logprob) for token in tokens],
        [_top_by_text(token, token.top[:alternatives]) for token in tokens],
        offsets,
    )


def _top_by_text(token: Token, top: Sequence[TopToken]) -> dict[str, float] | None:
    """Return the alternatives with the chosen token among them; None for a first prompt token, which was not chosen."""
    if token.logprob is None:
        return None
    return {**{found.text: finite(found.logprob) for found in top}, token.text: finite(token.logprob)}


# --- format ---


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

    def logprobs(self, tokens: Sequence[Token]) -> _Logprobs | None:
        if self._alternatives is None:
            return None
        logprobs = _logprobs(tokens, self._alternatives, self._offset)
        self._offset += sum(len(token.text) for token in tokens)
        return logprobs


class CompletionBody(OpenAIExchange):
    """A whole completion, with a choice for each prompt."""

    stream = False
    content_type = "application/json"

    def __init__(
        self, requests: tuple[GenerationRequest, ...], envelope: Envelope, warnings: tuple[str, ...], echo: bool
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
            self._finish_reasons[index] = FINISH[delta.finish_reason]
        if delta.usage is not None:
            self._usages.append(delta.usage)
        return b""

    def body(self) -> bytes:
        choices = [
            _Choice(index, "".join(texts), progress.logprobs(tokens), reason)
            for index, (texts, tokens, progress, reason) in enumerate(
                zip(self._texts, self._tokens, self._progress, self._finish_reasons, strict=True)
            )
        ]
        answer = answer_of("text_completion", self._envelope, choices)
        answer.usage = usage_of(self._usages)
        return encode(answer)


class CompletionStream(OpenAIExchange):
    """The chunks of a completion; each choice's last one has its finish reason."""

    stream = True
    content_type = SSE.content_type

    def __init__(
        self,
        requests: tuple[GenerationRequest, ...],
        envelope: Envelope,
        warnings: tuple[str, ...],
        echo: bool,
        include_usage: bool,
    ) -> None:
        super().__init__(requests, envelope, warnings)
        self._progress = [_Progress(request, echo) for request in requests]
        self._chunks = Chunks("text_completion", envelope, SSE, include_usage)
        self._around = [self._chunks.around_text(_Choice(i, "", None, None)) for i in range(len(requests))]

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
        reason = None if delta.finish_reason is None else FINISH[delta.finish_reason]
        return self._chunks.write(_Choice(index, text, logprobs, reason))

    def last(self) -> bytes:
        return self._chunks.end(self._usages)
