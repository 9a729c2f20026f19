"""What the answers of completions and chats share: usage, log probabilities, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.generation import Delta, FinishReason, GenerationRequest, Token, TopToken, Usage
from lmi_server.dialects.base import Exchange
from lmi_server.dialects.errors import error_event
from lmi_server.dialects.framing import Framing
from lmi_server.dialects.openai.request import AnswerOptions, Envelope

FINISH: dict[FinishReason, str] = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}
_LEAST_LOGPROB = -9999.0  # what OpenAI reports where there is no finite number


class _PromptDetails(msgspec.Struct):
    cached_tokens: int


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageBody(msgspec.Struct):
    """OpenAI's usage."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _PromptDetails | UnsetType = UNSET
    completion_tokens_details: _CompletionDetails | UnsetType = UNSET


class PromptLogprob(msgspec.Struct):
    """vLLM's way to tell one alternative for a prompt token."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Answer(msgspec.Struct):
    """What an answer and a chunk have in common: everything but the kind of their choices.

    `prompt_logprobs` and `prompt_token_ids` stand here for a chat, and in the choices of a completion.
    """

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[msgspec.Struct]
    usage: UsageBody | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


def answer_of(kind: str, envelope: Envelope, choices: Sequence[msgspec.Struct]) -> Answer:
    return Answer(envelope.id, kind, envelope.created, envelope.model, choices)


def finite(logprob: float | None) -> float:
    return logprob if logprob is not None and logprob > _LEAST_LOGPROB else _LEAST_LOGPROB  # NaN compares false


def shown(token: Token | TopToken, options: AnswerOptions) -> str:
    """Return how log probabilities tell a token."""
    return f"token_id:{token.id}" if options.tokens_as_ids else token.text


def prompt_logprobs(tokens: Sequence[Token], alternatives: int) -> PromptLogprobs:
    """Return the log probabilities of a prompt in vLLM's form; None for the first token, which nothing precedes."""
    return [None if token.logprob is None else _prompt_logprob(token, alternatives) for token in tokens]


def _prompt_logprob(token: Token, alternatives: int) -> dict[str, PromptLogprob]:
    top = {
        str(other.id): PromptLogprob(finite(other.logprob), rank, other.text)
        for rank, other in enumerate(token.top[:alternatives], start=1)
    }
    own = PromptLogprob(finite(token.logprob), token.rank, token.text)
    return {str(token.id): top.get(str(token.id), own), **top}


class Tally:
    """What the sequences of a request have used so far. A prompt counts once, however many choices it has."""

    def __init__(self, sequences: int, per_prompt: int) -> None:
        self._per_prompt = per_prompt
        self._final: list[Usage | None] = [None] * sequences
        self._prompt_tokens = [0] * sequences
        self._completion_tokens = [0] * sequences

    def open(self, index: int, prompt_tokens: int) -> None:
        """Take the length of a sequence's prompt, for `so_far`."""
        self._prompt_tokens[index] = prompt_tokens

    def take(self, index: int, delta: Delta) -> None:
        """Count a delta; needed of every one for `so_far`, of each sequence's last for `total`."""
        if delta.prompt_token_ids is not None:
            self.open(index, len(delta.prompt_token_ids))
        self._completion_tokens[index] += len(delta.tokens)
        if delta.usage is not None:
            self._final[index] = delta.usage

    def so_far(self, index: int) -> UsageBody:
        prompt, completion = self._prompt_tokens[index], self._completion_tokens[index]
        return UsageBody(prompt, completion, prompt + completion)

    def total(self) -> UsageBody:
        known = [usage for usage in self._final if usage is not None]
        prompts = [usage for usage in self._final[:: self._per_prompt] if usage is not None]
        prompt = sum(usage.prompt_tokens for usage in prompts)
        completion = sum(usage.completion_tokens for usage in known)
        body = UsageBody(prompt, completion, prompt + completion)
        body.prompt_tokens_details = _PromptDetails(sum(usage.cached_tokens for usage in prompts))
        reasoning = [usage.reasoning_tokens for usage in known if usage.reasoning_tokens is not None]
        if reasoning:
            body.completion_tokens_details = _CompletionDetails(sum(reasoning))
        return body


class Parsed(NamedTuple):
    """A request, parsed: the sequences to generate, and what their answer needs of it."""

    requests: tuple[GenerationRequest, ...]
    envelope: Envelope
    warnings: tuple[str, ...]
    options: AnswerOptions


class OpenAIExchange(Exchange):
    """What the four kinds of answer share. Sequence i belongs to prompt i // (sequences per prompt)."""

    def __init__(self, parsed: Parsed, per_prompt: int) -> None:
        self.requests, self._envelope, self.warnings, self._options = parsed
        self._tally = Tally(len(parsed.requests), per_prompt)

    def error_chunk(self, error: LmiServerError) -> bytes:
        return error_event("completions", self.content_type, error)


class Chunks:
    """Writes the chunks of a stream; those of plain text are put together from bytes that never change.

    Tens of thousands of them are written per second.
    """

    def __init__(self, kind: str, envelope: Envelope, framing: Framing, include_usage: bool) -> None:
        self._kind = kind
        self._envelope = envelope
        self._framing = framing
        self._include_usage = include_usage

    def write(
        self, choice: msgspec.Struct, usage: UsageBody | None = None, prompt_token_ids: list[int] | UnsetType = UNSET
    ) -> bytes:
        chunk = answer_of(self._kind, self._envelope, [choice])
        chunk.prompt_token_ids = prompt_token_ids
        if self._include_usage:
            chunk.usage = usage
        return self._framing.frame(chunk)

    def around_text(self, choice: msgspec.Struct) -> tuple[bytes, bytes]:
        """Return what stands before and after the text of a chunk with this choice, whose text is empty."""
        before, mark, after = self.write(choice).rpartition(b'""')
        assert mark, "the choice's text is the last empty string of its chunk"
        return before, after

    def end(self, tally: Tally) -> bytes:
        if not self._include_usage:
            return self._framing.done
        chunk = answer_of(self._kind, self._envelope, [])
        chunk.usage = tally.total()
        return self._framing.frame(chunk) + self._framing.done
