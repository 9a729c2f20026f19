"""Writes LMI's answers: one JSON object, plain text, or a stream with a JSON object per token."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.generation import Delta, GenerationRequest, Token, Usage
from lmi_server.dialects.base import Exchange
from lmi_server.dialects.framing import Framing, encode, on_one_line
from lmi_server.dialects.lmi.objects import (
    AnyToken,
    AsyncAnswer,
    Details,
    Line,
    LmiToken,
    PrefillToken,
    TgiLine,
    TgiToken,
    WholeAnswer,
)

NO_TOKEN = Token(-1, "")
"""LMI's token of a line that carries text and no token."""


class LmiAnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the request asks of the form of its answer.

    `prompt`: None if the request has token ids, whose text comes with the first delta. `full_text`: the answer begins
    with the prompt. `prefill`: `details` lists the prompt's tokens. `top_n`: the number of alternatives per token.
    `tgi`: the shapes follow text-generation-inference. `as_list`: one JSON object is a list of one. `n`: the
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


class CollectedSequence:
    """What the deltas of a sequence add up to. Subclasses know the form of its details."""

    def __init__(self, options: LmiAnswerOptions) -> None:
        self.options = options
        self.prompt = options.prompt
        self.prompt_tokens: tuple[Token, ...] = ()
        self.tokens: list[tuple[Token, str]] = []  # with their texts; only if `add_tokens` is called
        self.with_alternatives: list[Token] = []  # only if the request asks for alternatives
        self.count = 0
        self.end: Delta | None = None
        self._texts: list[str] = []
        self._keeps_alternatives = options.top_n > 0

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self.count += len(delta.tokens)
        if self.prompt is None:
            self.prompt = delta.prompt_text
        if self._keeps_alternatives:
            self.with_alternatives += delta.tokens
        if delta.prompt_tokens is not None:
            self.prompt_tokens = delta.prompt_tokens
        if delta.finish_reason is not None:
            self.end = delta

    def add_tokens(self, delta: Delta) -> None:
        """Keep the tokens of a delta, for its details and for `likelihood`."""
        if delta.tokens:
            self.tokens += zip(delta.tokens, token_texts(delta), strict=True)

    @property
    def likelihood(self) -> float:
        """The mean log probability per token, by which text-generation-inference chooses the best sequence."""
        return sum(token.logprob or 0.0 for token, _ in self.tokens) / max(self.count, 1)

    def text(self) -> str:
        return ((self.prompt or "") if self.options.full_text else "") + "".join(self._texts)

    def whole_details(self) -> Any:
        """Return the `details` of an answer that is not streamed."""
        raise NotImplementedError

    def as_other(self) -> Any:
        """Return this sequence as one of `best_of_sequences`."""
        details = self.whole_details()
        details.generated_text = self.text()
        return details


class LmiSequence(CollectedSequence):
    """A sequence with details in the form of LMI or of text-generation-inference."""

    def token(self, token: Token, text: str) -> AnyToken:
        """Return the JSON object of `token`, with `text` instead of its own."""
        kind = TgiToken if self.options.tgi else LmiToken
        return kind(token.id, text, token.logprob, token.special)

    def alternatives(self, token: Token) -> list[AnyToken]:
        kind = TgiToken if self.options.tgi else LmiToken
        return [kind(top.id, top.text, top.logprob, False) for top in token.top[: self.options.top_n]]

    def details(self) -> Details:
        """Return the `details` that every form of answer has."""
        options, end = self.options, self.end
        usage = None if end is None else end.usage
        details = Details(None if end is None else end.finish_reason, usage.completion_tokens if usage else self.count)
        if options.tgi:
            details.seed = options.seed
            details.input_length = usage.prompt_tokens if usage else UNSET
        details.inputs = self.prompt or ""
        details.note = room_note(usage)
        if options.prefill:
            details.prefill = self._prefill()
        if options.top_n:
            details.top_tokens = [self.alternatives(token) for token in self.with_alternatives]
        return details

    def whole_details(self) -> Details:
        details = self.details()
        details.tokens = [self.token(token, text) for token, text in self.tokens]
        if self.options.tgi and details.prefill is UNSET:
            details.prefill = []  # text-generation-inference always writes the key
        return details

    def as_other(self) -> Details:
        details: Details = super().as_other()
        details.inputs = UNSET
        return details

    def _prefill(self) -> list[AnyToken] | list[PrefillToken]:
        if self.options.tgi:
            return [PrefillToken(token.id, token.text, token.logprob) for token in self.prompt_tokens]
        return [self.token(token, token.text) for token in self.prompt_tokens]


class ParsedLmi(msgspec.Struct, frozen=True):
    """A parsed request: the sequences to generate, and what their answer needs of it."""

    requests: tuple[GenerationRequest, ...]
    options: LmiAnswerOptions
    warnings: tuple[str, ...]


class LmiExchange(Exchange):
    """What the forms of LMI's answers share."""

    sequence_type: type[CollectedSequence] = LmiSequence

    def __init__(self, parsed: ParsedLmi) -> None:
        self.requests = parsed.requests
        self.warnings = parsed.warnings
        self._options = parsed.options
        self._sequences: list[Any] = [self.sequence_type(parsed.options)]
        while len(self._sequences) < len(parsed.requests):
            self._sequences.append(self.sequence_type(parsed.options))

    def _by_rank(self) -> list[Any]:
        """Return the sequences of the answer, the best one first."""
        if not self._options.best_of:
            return self._sequences
        return sorted(self._sequences, key=lambda sequence: -sequence.likelihood)[: self._options.n]


class JsonExchange(LmiExchange):
    """One JSON object at the end, or a list of one, as text-generation-inference answers `POST /`."""

    answer_type: type[WholeAnswer] | type[AsyncAnswer] = WholeAnswer

    def add(self, index: int, delta: Delta) -> bytes:
        sequence = self._sequences[index]
        sequence.add(delta)
        if self._options.details:
            sequence.add_tokens(delta)
        return b""

    def body(self) -> bytes:
        best, *others = self._by_rank()
        answer = self.answer_type(best.text())
        if self._options.details:
            details = answer.details = best.whole_details()
            if others:
                details.best_of_sequences = [other.as_other() for other in others]
        return encode([answer] if self._options.as_list else answer)


class TextExchange(LmiExchange):
    """The generated text and nothing else, streamed if the request asks for a stream."""

    content_type = "text/plain; charset=utf-8"
    sequence_type = CollectedSequence

    def __init__(self, parsed: ParsedLmi, stream: bool) -> None:
        super().__init__(parsed)
        self.stream = stream

    def first(self) -> bytes:
        return (self._options.prompt or "").encode() if self._options.full_text else b""

    def add(self, index: int, delta: Delta) -> bytes:
        self._sequences[0].add(delta)
        if delta.prompt_text and self._options.full_text and self._options.prompt is None:
            return (delta.prompt_text + delta.text).encode()
        return delta.text.encode()

    def body(self) -> bytes:
        text: str = self._sequences[0].text()
        return text.encode()

    def error_chunk(self, error: LmiServerError) -> bytes:
        # The line end separates the error from the text, which has no framing of its own.
        return b"\n" + super().error_chunk(error)


class LinesExchange(LmiExchange):
    """One framed JSON object per token; the last one has the whole text, and `details` if the request asks for them."""

    stream = True

    def __init__(self, parsed: ParsedLmi, framing: Framing) -> None:
        super().__init__(parsed)
        self.content_type = framing.content_type
        self._framing = framing
        # Attributes of this object are read in less time than those of structs.
        self._start, self._end, self._is_tgi = framing.start, framing.end, parsed.options.tgi
        self._written: LmiSequence = self._sequences[0]
        self._index = 0

    def add(self, index: int, delta: Delta) -> bytes:
        self._written.add(delta)
        tokens = delta.tokens
        if not tokens:
            return self._without_token(delta)
        last = delta.finish_reason is not None
        # Nearly every delta is so, thousands of times a second: no list, no join, no calls of functions here.
        if len(tokens) == 1 and not last and not self._is_tgi:
            token = tokens[0]
            data = encode(Line(LmiToken(token.id, delta.text, token.logprob, token.special)))
            return self._start + (data if data.isascii() else on_one_line(data)) + self._end
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
        if self._is_tgi:
            return self._tgi_line(token, text, last)
        line = Line(LmiToken(token.id, text, token.logprob, token.special))
        if last:
            line.generated_text = self._written.text()
            if self._options.details:
                line.details = self._details()
        return line

    def _details(self) -> Details:
        return self._written.details()

    def _tgi_line(self, token: Token, text: str, last: bool) -> TgiLine:
        self._index += 1
        top = self._written.alternatives(token) if self._options.top_n else UNSET
        line = TgiLine(self._index, self._written.token(token, text), top)
        if last:
            line.generated_text = self._written.text()
            if self._options.details:
                line.details = self._details()
                line.details.top_tokens = UNSET  # each line has had its own
        return line


class BestLinesExchange(LinesExchange):
    """The lines of the best of several sequences, all at the end; the last line has the others in its details."""

    def __init__(self, parsed: ParsedLmi, framing: Framing) -> None:
        super().__init__(parsed, framing)
        self._written = LmiSequence(parsed.options)
        self._deltas: list[list[Delta]] = [[] for _ in parsed.requests]
        self._others: list[CollectedSequence] = []

    def add(self, index: int, delta: Delta) -> bytes:
        self._sequences[index].add(delta)
        self._sequences[index].add_tokens(delta)
        self._deltas[index].append(delta)
        return b""

    def last(self) -> bytes:
        best, *self._others = self._by_rank()
        add = super().add
        return b"".join(add(0, delta) for delta in self._deltas[self._sequences.index(best)])

    def _details(self) -> Details:
        details = super()._details()
        details.best_of_sequences = [other.as_other() for other in self._others]
        return details
