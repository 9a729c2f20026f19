"""OpenAI's completions: parses requests of one or more prompts, and writes answers of `n` choices per prompt."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import Delta, GenerationRequest, SamplingParameters, Token
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.fields import Field
from lmi_server.dialects.framing import JSON_LINES, Framing, encode, encode_line
from lmi_server.dialects.openai.answer import (
    Chunks,
    OpenAIExchange,
    ParsedOpenAI,
    PromptLogprobs,
    finite,
    prompt_logprobs,
    token_label,
)
from lmi_server.dialects.openai.request import (
    SHARED_FIELDS,
    UNSUPPORTED,
    AnswerOptions,
    Envelope,
    answer_options,
    default_model_name,
    generation_request,
    read,
    sampling_parameters,
    stream_framing,
)
from lmi_server.dialects.parameters.choices import CHOICES, FINISH, choices_of

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
    "max_tokens": Field("max_tokens", fields.integer(0, 2**31 - 1)),
    "best_of": Field("best_of", CHOICES),
    "echo": Field("echo", fields.boolean),
    "logprobs": Field("logprobs", fields.LOGPROBS),
    "add_special_tokens": Field("add_special_tokens", fields.boolean),
    "suffix": Field(None, fields.off("leave it out: the model does not fill in text")),
    "prompt_embeds": Field(None, UNSUPPORTED),
}


class _CompletionOptions(msgspec.Struct, frozen=True):
    """The form of a completion's answer, beyond the form of chats.

    `prompt_only`: max_tokens is 0. The engine generates one token all the same, and the answer leaves it out.
    `candidates`: sequences per prompt (`best_of`). If they are more than `n`, the answer has the `n` likeliest.
    """

    echo: bool = False
    prompt_only: bool = False
    candidates: int = 1


def parse_completion(request: Input, body: dict[str, Any], served: ServedModel) -> Exchange:
    """Parse a body of /v1/completions: `n` sequences, or `best_of`, for each prompt. Raises RequestError."""
    asked = read(request, body, COMPLETION_FIELDS, served, "cmpl")
    values = asked.values
    if "prompts" not in values:
        raise RequestError("prompt is missing; send a string, a list of strings or a list of token ids")
    options = answer_options(values, values.get("logprobs"))
    form = _completion_options(values, options, asked.stream)
    prompts = values["prompts"]
    _check_count(len(prompts) * form.candidates)
    special = values.get("add_special_tokens", True)
    generation = generation_request(
        request, asked, _sampling(values, options, form, served), prompt=None, add_special_tokens=special
    )
    requests = [
        choice
        for place, prompt in enumerate(prompts)
        for choice in choices_of(
            msgspec.structs.replace(generation, request_id=f"{asked.envelope.id}-{place}", prompt=prompt),
            form.candidates,
        )
    ]
    parsed = ParsedOpenAI(tuple(requests), asked.envelope, asked.warnings, options)
    if asked.stream:
        return CompletionStream(parsed, form, stream_framing(request, served))
    return CompletionBody(parsed, form)


def completion_lines(requests: Sequence[GenerationRequest], warnings: tuple[str, ...], served: ServedModel) -> Exchange:
    """Return the chunks, as JSON lines, of a completion that a request in LMI's form asks for.

    They have what LMI's asynchronous service has vLLM write: log probabilities by the id of each token, and the usage.
    """
    options = AnswerOptions(
        alternatives=1, n=len(requests), include_usage=True, continuous_usage=True, tokens_as_ids=True
    )
    scored = tuple(msgspec.structs.replace(request, sampling=_with_logprobs(request.sampling)) for request in requests)
    envelope = Envelope(f"cmpl-{requests[0].request_id}", int(time.time()), default_model_name(served))
    form = _CompletionOptions(candidates=len(requests))
    return CompletionStream(ParsedOpenAI(scored, envelope, warnings, options), form, JSON_LINES)


def _with_logprobs(sampling: SamplingParameters) -> SamplingParameters:
    return msgspec.structs.replace(sampling, logprobs=max(sampling.logprobs or 0, 1))


def _sampling(
    values: Mapping[str, Any], options: AnswerOptions, form: _CompletionOptions, served: ServedModel
) -> SamplingParameters:
    scores: dict[str, int | None] = {}
    if form.echo and options.alternatives is not None:
        scores["prompt_logprobs"] = max(options.alternatives, options.prompt_alternatives or 0)
    if form.candidates > options.n:  # they are ranked by their log probabilities
        scores["logprobs"] = options.alternatives or 0
    # Engines generate at least one token; see `_CompletionOptions.prompt_only`.
    return sampling_parameters(values, served, values.get("max_tokens", 16) or 1, **scores)


def _completion_options(values: Mapping[str, Any], options: AnswerOptions, stream: bool) -> _CompletionOptions:
    echo, candidates = values.get("echo", False), values.get("best_of", options.n)
    if candidates < options.n:
        raise fields.not_allowed("best_of", candidates, f"send at least n, which is {options.n}")
    if candidates > options.n and stream:
        raise RequestError("best_of is not available in a stream; leave it out, or do not stream")
    if values.get("max_tokens") == 0 and not echo:
        raise fields.not_allowed("max_tokens", 0, "send an integer >= 1, or echo: true with it")
    return _CompletionOptions(echo, values.get("max_tokens") == 0, candidates)


def _check_count(sequences: int) -> None:
    if sequences > _MAX_PROMPTS:
        raise RequestError(f"prompt, n and best_of make {sequences} sequences; send requests of {_MAX_PROMPTS} at most")


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
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


def _logprobs(tokens: Sequence[Token], options: AnswerOptions, offset: int) -> _Logprobs:
    """Return the log probabilities of `tokens`; the first token begins at character `offset` of the choice."""
    texts = [token_label(token, options) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return _Logprobs(
        texts,
        [None if token.logprob is None else finite(token.logprob) for token in tokens],
        [_top_by_text(token, options) for token in tokens],
        offsets,
    )


def _top_by_text(token: Token, options: AnswerOptions) -> dict[str, float] | None:
    """Return the alternatives and the chosen token; None for the first token of a prompt, which nothing precedes.

    An alternative has the text of its token alone. The chosen token has the text that it adds to the answer, once.
    """
    if token.logprob is None:
        return None
    named = ((token if other.id == token.id else other, other.logprob) for other in token.top[: options.alternatives])
    top = {token_label(one, options): finite(logprob) for one, logprob in named}
    return {**top, token_label(token, options): finite(token.logprob)}


# --- the answers ---


class _ChoiceText:
    """Text, tokens and offsets of one choice, delta by delta; it puts an echoed prompt in front."""

    def __init__(self, request: GenerationRequest, options: AnswerOptions, form: _CompletionOptions) -> None:
        self._prompt = request.prompt
        self._options = options
        self._form = form
        self._echo = form.echo  # until the first delta, which brings the prompt
        self._offset = 0

    def take(self, delta: Delta) -> tuple[str, tuple[Token, ...]]:
        """Return the text and the tokens that `delta` adds; with echo, the prompt comes first."""
        text, tokens = ("", ()) if self._form.prompt_only else (delta.text, delta.tokens)
        if not self._echo:
            return text, tokens
        self._echo = False
        prompt = self._prompt if isinstance(self._prompt, str) else delta.prompt_text or ""
        return prompt + text, (delta.prompt_tokens or ()) + tokens

    def logprobs(self, tokens: Sequence[Token]) -> _Logprobs | None:
        if self._options.alternatives is None:
            return None
        logprobs = _logprobs(tokens, self._options, self._offset)
        if tokens:
            self._offset = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
        return logprobs


class _Candidate:
    """Collects the deltas of one sequence of an answer that is not streamed."""

    def __init__(self, request: GenerationRequest, options: AnswerOptions, form: _CompletionOptions) -> None:
        self._options = options
        self._choice_text = _ChoiceText(request, options, form)
        self._keeps_tokens = options.token_ids or form.candidates > options.n
        self._texts: list[str] = []
        self._scored: list[Token] = []  # the tokens of `logprobs`, an echoed prompt's included
        self._tokens: list[Token] = []
        self._first: Delta | None = None  # it describes the prompt
        self._last: Delta | None = None

    def take(self, delta: Delta) -> None:
        if self._first is None:
            self._first = delta
        text, tokens = self._choice_text.take(delta)
        self._texts.append(text)
        if self._options.alternatives is not None:
            self._scored += tokens
        if self._keeps_tokens:
            self._tokens += delta.tokens
        if delta.finish_reason is not None:
            self._last = delta

    @property
    def likelihood(self) -> float:
        """The mean log probability per token, by which OpenAI ranks candidates."""
        return sum(finite(token.logprob) for token in self._tokens) / max(len(self._tokens), 1)

    def choice(self, index: int) -> _Choice:
        assert self._first is not None
        assert self._last is not None
        assert self._last.finish_reason is not None
        choice = _Choice(
            index,
            "".join(self._texts),
            self._choice_text.logprobs(self._scored),
            FINISH[self._last.finish_reason],
            self._last.stop_reason,
        )
        if self._options.prompt_alternatives is not None:
            choice.prompt_logprobs = prompt_logprobs(self._first.prompt_tokens or (), self._options.prompt_alternatives)
        if self._options.token_ids:
            choice.prompt_token_ids = list(self._first.prompt_token_ids or ())
            choice.token_ids = [token.id for token in self._tokens]
        return choice


class CompletionBody(OpenAIExchange):
    """A whole completion."""

    def __init__(self, parsed: ParsedOpenAI, form: _CompletionOptions) -> None:
        super().__init__(parsed, form.candidates)
        self._form = form
        self._candidates = [_Candidate(request, parsed.options, form) for request in parsed.requests]

    def add(self, index: int, delta: Delta) -> bytes:
        self._candidates[index].take(delta)
        if delta.usage is not None:
            self._tally.add(index, delta)
        return b""

    def body(self) -> bytes:
        choices = [candidate.choice(index) for index, candidate in enumerate(self._best())]
        return encode(self._answer("text_completion", choices))

    def _best(self) -> list[_Candidate]:
        """Return the candidates of the answer: for each prompt, the `n` likeliest."""
        per_prompt, wanted = self._form.candidates, self._options.n
        if per_prompt == wanted:
            return self._candidates
        prompts = range(0, len(self._candidates), per_prompt)
        groups = [self._candidates[first : first + per_prompt] for first in prompts]
        return [best for group in groups for best in sorted(group, key=lambda one: -one.likelihood)[:wanted]]


class CompletionStream(OpenAIExchange):
    """The chunks of a completion; the last one of each choice has the finish reason."""

    stream = True

    def __init__(self, parsed: ParsedOpenAI, form: _CompletionOptions, framing: Framing) -> None:
        options = parsed.options
        self.content_type = framing.content_type
        super().__init__(parsed, form.candidates)
        self._choice_text = [_ChoiceText(request, options, form) for request in parsed.requests]
        self._chunks = Chunks("text_completion", parsed.envelope, framing, options.include_usage)
        self._around = [self._chunks.around_text(_Choice(i, "", None, None)) for i in range(len(parsed.requests))]
        self._text_only = options.text_only

    def add(self, index: int, delta: Delta) -> bytes:
        text, tokens = self._choice_text[index].take(delta)
        if delta.finish_reason is None and self._text_only:
            before, after = self._around[index]
            return before + encode_line(text) + after if text else b""
        if delta.finish_reason is None and not text and not tokens:
            return b""
        self._tally.add(index, delta)
        reason = None if delta.finish_reason is None else FINISH[delta.finish_reason]
        choice = _Choice(index, text, self._choice_text[index].logprobs(tokens), reason)
        if reason is not None:
            choice.stop_reason = delta.stop_reason
        if self._options.token_ids:
            choice.token_ids = [token.id for token in delta.tokens]
            if delta.prompt_token_ids is not None:
                choice.prompt_token_ids = list(delta.prompt_token_ids)
        return self._chunks.write(choice, self._tally.so_far(index) if self._options.continuous_usage else None)

    def last(self) -> bytes:
        return self._chunks.end(self._tally)
