"""What the answers of completions and chats share: the objects, usage, log probabilities, chunks of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from lmi_server.contract.generation import Delta, GenerationRequest, Token, TopToken, Usage
from lmi_server.dialects.base import Exchange
from lmi_server.dialects.framing import Framing
from lmi_server.dialects.openai.request import AnswerOptions, Envelope
from lmi_server.dialects.routes import COMPLETIONS

_MIN_LOGPROB = -9999.0  # OpenAI writes it for log probabilities that are not finite: JSON has no infinity


class _PromptDetails(msgspec.Struct):
    cached_tokens: int


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageObject(msgspec.Struct):
    """OpenAI's `usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _PromptDetails | UnsetType = UNSET
    completion_tokens_details: _CompletionDetails | UnsetType = UNSET


class PromptLogprob(msgspec.Struct):
    """One alternative of a prompt token in vLLM's form."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class AnswerObject(msgspec.Struct):
    """A whole answer, or one chunk of a stream; the types of their choices differ.

    A chat has `prompt_logprobs` and `prompt_token_ids` here, a completion has them in its choices. As with vLLM, a
    whole answer has the transfer parameters of its first sequence.
    """

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[msgspec.Struct]
    usage: UsageObject | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: Any = UNSET
    ec_transfer_params: Any = UNSET


def answer_object(kind: str, envelope: Envelope, choices: Sequence[msgspec.Struct]) -> AnswerObject:
    """Return an answer of `kind`, the value of its field `object`."""
    return AnswerObject(envelope.id, kind, envelope.created, envelope.model, choices)


def finite(logprob: float | None) -> float:
    """Return the log probability, or OpenAI's number for one that is missing or not finite."""
    return logprob if logprob is not None and logprob > _MIN_LOGPROB else _MIN_LOGPROB  # NaN compares false


def token_label(token: Token | TopToken, options: AnswerOptions) -> str:
    """Return the text that stands for a token in log probabilities."""
    return f"token_id:{token.id}" if options.tokens_as_ids else token.text


def prompt_logprobs(tokens: Sequence[Token], alternatives: int) -> PromptLogprobs:
    """Return the log probabilities of a prompt in vLLM's form; None for the first token, which nothing precedes."""
    return [None if token.logprob is None else _prompt_logprob(token, alternatives) for token in tokens]


def _prompt_logprob(token: Token, alternatives: int) -> dict[str, PromptLogprob]:
    top = {
        str(other.id): PromptLogprob(finite(other.logprob), rank, other.text)
        for rank, other in enumerate(token.top[:alternatives], start=1)
    }
    # The actual token comes first, as with vLLM; it may be one of the alternatives or not.
    own = PromptLogprob(finite(token.logprob), token.rank, token.text)
    return {str(token.id): top.get(str(token.id), own), **top}


class Tally:
    """Counts the tokens of a request's sequences. A prompt counts once, however many choices it has."""

    def __init__(self, sequences: int, per_prompt: int) -> None:
        self._per_prompt = per_prompt
        self._final: list[Usage | None] = [None] * sequences
        self._prompt_tokens = [0] * sequences
        self._completion_tokens = [0] * sequences
        self.transfer_params: Mapping[str, Any] = {}  # of the first sequence

    def set_prompt(self, index: int, prompt_tokens: int) -> None:
        """Set the number of prompt tokens of a sequence, for `so_far`."""
        self._prompt_tokens[index] = prompt_tokens

    def add(self, index: int, delta: Delta) -> None:
        """Count a delta. `so_far` needs every delta, `total` only the last of each sequence."""
        if delta.prompt_token_ids is not None:
            self.set_prompt(index, len(delta.prompt_token_ids))
        self._completion_tokens[index] += len(delta.tokens)
        if delta.usage is not None:
            self._final[index] = delta.usage
            if delta.transfer_params and not index:
                self.transfer_params = delta.transfer_params

    def so_far(self, index: int) -> UsageObject:
        """Return the usage of one sequence up to now."""
        prompt, completion = self._prompt_tokens[index], self._completion_tokens[index]
        return UsageObject(prompt, completion, prompt + completion)

    def total(self) -> UsageObject:
        """Return the usage of the whole request."""
        known = [usage for usage in self._final if usage is not None]
        # The choices of one prompt follow each other; the first of each group stands for its prompt.
        prompts = [usage for usage in self._final[:: self._per_prompt] if usage is not None]
        prompt = sum(usage.prompt_tokens for usage in prompts)
        completion = sum(usage.completion_tokens for usage in known)
        body = UsageObject(prompt, completion, prompt + completion)
        body.prompt_tokens_details = _PromptDetails(sum(usage.cached_tokens for usage in prompts))
        reasoning = [usage.reasoning_tokens for usage in known if usage.reasoning_tokens is not None]
        if reasoning:
            body.completion_tokens_details = _CompletionDetails(sum(reasoning))
        return body


class ParsedOpenAI(msgspec.Struct, frozen=True):
    """A parsed request: the sequences to generate, and what their answer needs of it."""

    requests: tuple[GenerationRequest, ...]
    envelope: Envelope
    warnings: tuple[str, ...]
    options: AnswerOptions


class OpenAIExchange(Exchange):
    """What the four kinds of answer share. Sequence `i` belongs to prompt `i // per_prompt`."""

    error_route = COMPLETIONS

    def __init__(self, parsed: ParsedOpenAI, per_prompt: int) -> None:
        self.requests = parsed.requests
        self.warnings = parsed.warnings
        self._envelope = parsed.envelope
        self._options = parsed.options
        self._tally = Tally(len(parsed.requests), per_prompt)

    def _answer(self, kind: str, choices: Sequence[msgspec.Struct]) -> AnswerObject:
        """Return a whole answer with its usage."""
        answer = answer_object(kind, self._envelope, choices)
        answer.usage = self._tally.total()
        answer.kv_transfer_params = self._tally.transfer_params.get("kv_transfer_params", UNSET)
        answer.ec_transfer_params = self._tally.transfer_params.get("ec_transfer_params", UNSET)
        return answer


class Chunks:
    """Writes the chunks of a stream.

    A busy worker writes tens of thousands of chunks per second, and nearly all of them differ in their text alone. So
    `around_text` encodes one chunk ahead of time, and the caller puts the encoded text between its two halves.
    """

    def __init__(self, kind: str, envelope: Envelope, framing: Framing, include_usage: bool) -> None:
        self._kind = kind
        self._envelope = envelope
        self._framing = framing
        self._include_usage = include_usage

    def write(
        self, choice: msgspec.Struct, usage: UsageObject | None = None, prompt_token_ids: list[int] | UnsetType = UNSET
    ) -> bytes:
        chunk = answer_object(self._kind, self._envelope, [choice])
        chunk.prompt_token_ids = prompt_token_ids
        if self._include_usage:
            chunk.usage = usage
        return self._framing.frame(chunk)

    def around_text(self, choice: msgspec.Struct) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text of a chunk with this choice, whose text is empty."""
        before, mark, after = self.write(choice).rpartition(b'""')
        assert mark, "the text is the last empty string of its chunk"
        return before, after

    def end(self, tally: Tally) -> bytes:
        """Return the end of the stream: the chunk with the usage, if the request asks for it, and the closing event."""
        if not self._include_usage:
            return self._framing.done
        chunk = answer_object(self._kind, self._envelope, [])
        chunk.usage = tally.total()
        return self._framing.frame(chunk) + self._framing.done
