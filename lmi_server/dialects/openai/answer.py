"""What the answers of completions and chats share: usage, log probabilities, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from lmi_server.dialects.base import Exchange
from lmi_server.dialects.errors import error_event
from lmi_server.dialects.framing import Framing
from lmi_server.dialects.openai.request import Envelope
from lmi_server.errors import LmiServerError
from lmi_server.generation import FinishReason, GenerationRequest, Usage

FINISH: dict[FinishReason, str] = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}
_LEAST_LOGPROB = -9999.0  # what OpenAI reports where there is no finite number


class _Cached(msgspec.Struct):
    cached_tokens: int


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _Cached


class Answer(msgspec.Struct):
    """What an answer and a chunk have in common: everything but the kind of their choices."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[msgspec.Struct]
    usage: _Usage | UnsetType | None = UNSET


def answer_of(kind: str, envelope: Envelope, choices: Sequence[msgspec.Struct]) -> Answer:
    return Answer(envelope.id, kind, envelope.created, envelope.model, choices)


def usage_of(usages: list[Usage]) -> _Usage:
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    return _Usage(prompt, completion, prompt + completion, _Cached(cached))


def finite(logprob: float | None) -> float:
    return logprob if logprob is not None and logprob > _LEAST_LOGPROB else _LEAST_LOGPROB  # NaN compares false


class OpenAIExchange(Exchange):
    """What the four kinds of answer share."""

    def __init__(self, requests: tuple[GenerationRequest, ...], envelope: Envelope, warnings: tuple[str, ...]) -> None:
        self.requests = requests
        self.warnings = warnings
        self._envelope = envelope
        self._alternatives = requests[0].sampling.logprobs
        self._usages: list[Usage] = []

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

    def write(self, choice: msgspec.Struct) -> bytes:
        chunk = answer_of(self._kind, self._envelope, [choice])
        if self._include_usage:
            chunk.usage = None
        return self._framing.frame(chunk)

    def around_text(self, choice: msgspec.Struct) -> tuple[bytes, bytes]:
        """Return what stands before and after the text of a chunk with this choice, whose text is empty."""
        before, mark, after = self.write(choice).rpartition(b'""')
        assert mark, "the choice's text is the last empty string of its chunk"
        return before, after

    def end(self, usages: list[Usage]) -> bytes:
        if not self._include_usage:
            return self._framing.done
        chunk = answer_of(self._kind, self._envelope, [])
        chunk.usage = usage_of(usages)
        return self._framing.frame(chunk) + self._framing.done
