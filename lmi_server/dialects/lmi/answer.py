"""Writes LMI's answers: one JSON object, plain text, or a stream with a JSON object per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.generation import Delta, FinishReason, GenerationRequest, Token, Usage
from lmi_server.dialects.base import Exchange
from lmi_server.dialects.errors import error_event
from lmi_server.dialects.framing import Framing, encode, encode_line
from lmi_server.dialects.lmi.objects import (
    AnyToken,
    Details,
    Line,
    LmiToken,
    PrefillToken,
    TgiLine,
    TgiToken,
    WholeAnswer,
)
from lmi_server.dialects.routes import INVOCATIONS

NO_TOKEN = Token(-1, "")
"""LMI's token of a line that carries text and no token."""


class _Likely(Protocol):
    @property
    def likelihood(self) -> float: ...


_Candidate = TypeVar("_Candidate", bound=_Likely)


class AnswerOptions(msgspec.Struct, frozen=True):
    """What the request asks of the form of its answer.

    `prompt`: None if the request has token ids, whose text comes with the first delta. `full_text`: the answer begins
    with the prompt. `prefill`: `details` lists the prompt's tokens. `top_n`: the number of alternatives per token.
    `tgi`: the shapes are those of text-generation-inference. `as_list`: one JSON object is a list of one. `n`: the
    sequences in the answer; `candidates` are generated, and if `best_of` asks for that, the likeliest come first.
    """

    prompt: str | None
    full_text: bool
    details: bool
    prefill: bool
    top_n: int
    tgi: bool
    as_list: bool
    seed: int | None
    n: int = 1
    candidates: int = 1
    best_of: bool = False


def token_texts(delta: Delta) -> list[str]:
    """Return one text per token of `delta`; joined, they are `delta.text`.

    The texts of the tokens themselves differ from it if the delta holds text back, cuts a stop sequence, or joins bytes
    to a character. Then the last token carries the whole text and the others none.
    """
    tokens = delta.tokens
    if len(tokens) < 2:
        return [delta.text]
    texts = [token.text for token in tokens]
    if "".join(texts) == delta.text:
        return texts
    return [""] * (len(tokens) - 1) + [delta.text]


def room_note(usage: Usage | None) -> str | UnsetType:
    """Return the note of an answer that could not have as many tokens as the request asks for; UNSET for any other."""
    if usage is None or usage.room is None:
        return UNSET
    return (
        f"max_new_tokens was lowered to {usage.room}: the prompt has {usage.prompt_tokens} tokens, and the context"
        f" holds {usage.prompt_tokens + usage.room}"
    )


class _Collected:
    """What the deltas of a sequence add up to."""

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._token_type: type[LmiToken] | type[TgiToken] = TgiToken if options.tgi else LmiToken
        self.prompt = options.prompt
        self.tokens: list[AnyToken] = []
        self._logprob = 0.0
        self._texts: list[str] = []
        self._top: list[list[AnyToken]] = []
        self._prompt_tokens: tuple[Token, ...] = ()
        self._finish_reason: FinishReason | None = None
        self._usage: Usage | None = None
        self._count = 0

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._count += len(delta.tokens)
        if self._options.top_n:
            self._top += [self.alternatives(token) for token in delta.tokens]
        if self.prompt is None:
            self.prompt = delta.prompt_text
        if delta.prompt_tokens is not None:
            self._prompt_tokens = delta.prompt_tokens
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            self._usage = delta.usage

    def add_tokens(self, delta: Delta) -> None:
        """Keep the tokens of a delta for `whole_details`."""
        self.tokens += map(self.token, delta.tokens, token_texts(delta))
        self._logprob += sum(token.logprob or 0.0 for token in delta.tokens)

    @property
    def likelihood(self) -> float:
        """The mean log probability per token, by which text-generation-inference chooses the best sequence."""
        return self._logprob / max(self._count, 1)

    def token(self, token: Token, text: str) -> AnyToken:
        """Return the JSON object of `token`, with `text` instead of its own."""
        return self._token_type(token.id, text, token.logprob, token.special)

    def alternatives(self, token: Token) -> list[AnyToken]:
        return [self._token_type(top.id, top.text, top.logprob, False) for top in token.top[: self._options.top_n]]

    def text(self) -> str:
        return ((self.prompt or "") if self._options.full_text else "") + "".join(self._texts)

    def details(self) -> Details:
        """Return the `details` that every form of answer has."""
        options = self._options
        details = Details(self._finish_reason, self._usage.completion_tokens if self._usage else self._count)
        if options.tgi:
            details.seed = options.seed
        if self._usage and options.tgi:
            details.input_length = self._usage.prompt_tokens
        details.inputs = self.prompt or ""
        details.note = room_note(self._usage)
        if options.prefill:
            details.prefill = self._prefill()
        if options.top_n:
            details.top_tokens = self._top
        return details

    def whole_details(self) -> Details:
        """Return the `details` of an answer that is not streamed, with the tokens."""
        details = self.details()
        details.tokens = self.tokens
        if self._options.tgi and details.prefill is UNSET:
            details.prefill = []  # text-generation-inference always writes the key
        return details

    def as_other(self) -> Details:
        """Return this sequence as one of `best_of_sequences`."""
        details = self.whole_details()
        details.inputs, details.generated_text = UNSET, self.text()
        return details

    def _prefill(self) -> list[AnyToken] | list[PrefillToken]:
        if self._options.tgi:
            return [PrefillToken(token.id, token.text, token.logprob) for token in self._prompt_tokens]
        return [self.token(token, token.text) for token in self._prompt_tokens]


def ranked(sequences: Sequence[_Candidate], options: AnswerOptions) -> list[_Candidate]:
    """Return the sequences of the answer, the best one first."""
    if not options.best_of:
        return list(sequences)
    return sorted(sequences, key=lambda sequence: -sequence.likelihood)[: options.n]


class JsonExchange(Exchange):
    """One JSON object at the end, or a list of one, as text-generation-inference answers `POST /`."""

    stream = False
    content_type = "application/json"

    def __init__(
        self, requests: tuple[GenerationRequest, ...], options: AnswerOptions, warnings: tuple[str, ...]
    ) -> None:
        self.requests = requests
        self.warnings = warnings
        self._options = options
        self._sequences = [_Collected(options) for _ in requests]

    def add(self, index: int, delta: Delta) -> bytes:
        sequence = self._sequences[index]
        sequence.add(delta)
        if self._options.details and delta.tokens:
            sequence.add_tokens(delta)
        return b""

    def body(self) -> bytes:
        best, *others = ranked(self._sequences, self._options)
        answer = WholeAnswer(best.text())
        if self._options.details:
            answer.details = best.whole_details()
            if others:
                answer.details.best_of_sequences = [other.as_other() for other in others]
        return encode([answer] if self._options.as_list else answer)

    def error_chunk(self, error: LmiServerError) -> bytes:
        return error_event(INVOCATIONS, self.content_type, error)


class TextExchange(Exchange):
    """The generated text and nothing else, streamed if the request asks for a stream."""

    content_type = "text/plain; charset=utf-8"

    def __init__(
        self, request: GenerationRequest, options: AnswerOptions, warnings: tuple[str, ...], stream: bool
    ) -> None:
        self.requests = (request,)
        self.warnings = warnings
        self.stream = stream
        self._options = options
        self._collected = _Collected(options)

    def first(self) -> bytes:
        return (self._options.prompt or "").encode() if self._options.full_text else b""

    def add(self, index: int, delta: Delta) -> bytes:
        self._collected.add(delta)
        if delta.prompt_text and self._options.full_text and self._options.prompt is None:
            return (delta.prompt_text + delta.text).encode()
        return delta.text.encode()

    def body(self) -> bytes:
        return self._collected.text().encode()

    def error_chunk(self, error: LmiServerError) -> bytes:
        # The line end separates the error from the text, which has no framing of its own.
        return b"\n" + error_event(INVOCATIONS, self.content_type, error)


class LinesExchange(Exchange):
    """One framed JSON object per token; the last one has the whole text, and `details` if the request asks for them."""

    stream = True

    def __init__(
        self,
        requests: tuple[GenerationRequest, ...],
        options: AnswerOptions,
        warnings: tuple[str, ...],
        framing: Framing,
    ) -> None:
        self.requests = requests
        self.warnings = warnings
        self.content_type = framing.content_type
        self._framing = framing
        self._options = options
        self._collected = _Collected(options)
        self._index = 0

    def add(self, index: int, delta: Delta) -> bytes:
        self._collected.add(delta)
        tokens = delta.tokens
        if not tokens:
            return self._without_token(delta)
        start, end, last = self._framing.start, self._framing.end, delta.finish_reason is not None
        # Nearly every delta has one token, thousands of times a second: no list, no join, no call of `frame`.
        if len(tokens) == 1:
            return start + encode_line(self._line(tokens[0], delta.text, last)) + end
        ends_at = len(tokens) - 1
        return b"".join(
            self._framing.frame(self._line(token, text, last and i == ends_at))
            for i, (token, text) in enumerate(zip(tokens, token_texts(delta), strict=True))
        )

    def _without_token(self, delta: Delta) -> bytes:
        """Return the line of a delta without tokens, or nothing if it has no text and does not end the sequence."""
        if not delta.text and delta.finish_reason is None:
            return b""
        return self._framing.frame(self._line(NO_TOKEN, delta.text, delta.finish_reason is not None))

    def _line(self, token: Token, text: str, last: bool) -> Line | TgiLine:
        collected = self._collected
        if self._options.tgi:
            return self._tgi_line(token, text, last)
        if not last:
            return Line(LmiToken(token.id, text, token.logprob, token.special))
        details = self._details() if self._options.details else UNSET
        return Line(collected.token(token, text), collected.text(), details)

    def _details(self) -> Details:
        return self._collected.details()

    def _tgi_line(self, token: Token, text: str, last: bool) -> TgiLine:
        collected = self._collected
        self._index += 1
        top = collected.alternatives(token) if self._options.top_n else UNSET
        line = TgiLine(self._index, collected.token(token, text), top)
        if last:
            line.generated_text = collected.text()
            if self._options.details:
                line.details = self._details()
                line.details.top_tokens = UNSET  # each line has had its own
        return line

    def error_chunk(self, error: LmiServerError) -> bytes:
        return error_event(INVOCATIONS, self.content_type, error)


class BestLinesExchange(LinesExchange):
    """The lines of the best of several sequences, all at the end; the last line has the others in its details."""

    def __init__(
        self,
        requests: tuple[GenerationRequest, ...],
        options: AnswerOptions,
        warnings: tuple[str, ...],
        framing: Framing,
    ) -> None:
        super().__init__(requests, options, warnings, framing)
        self._sequences = [_Collected(options) for _ in requests]
        self._deltas: list[list[Delta]] = [[] for _ in requests]
        self._others: list[_Collected] = []

    def add(self, index: int, delta: Delta) -> bytes:
        self._sequences[index].add(delta)
        self._sequences[index].add_tokens(delta)
        self._deltas[index].append(delta)
        return b""

    def last(self) -> bytes:
        best, *self._others = ranked(self._sequences, self._options)
        add = super().add
        return b"".join(add(0, delta) for delta in self._deltas[self._sequences.index(best)])

    def _details(self) -> Details:
        details = super()._details()
        details.best_of_sequences = [other.as_other() for other in self._others]
        return details
