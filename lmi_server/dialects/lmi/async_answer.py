"""Writes answers in the shape of LMI's asynchronous service, which serves vLLM with `option.async_mode`.

A stream is JSON lines with the same keys on every line. Where that service says less than it knows, the answer says it:
`finish_reason` is not the stop sequence, and `generated_tokens` of a stream counts every token once.
"""

from __future__ import annotations

from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.generation import Delta, GenerationRequest
from lmi_server.dialects.base import Exchange
from lmi_server.dialects.choices import FINISH
from lmi_server.dialects.errors import error_event
from lmi_server.dialects.framing import JSON_LINES, encode, encode_line
from lmi_server.dialects.lmi.answer import NO_TOKEN, AnswerOptions, ranked, room_note, token_texts
from lmi_server.dialects.lmi.objects import AsyncAnswer, AsyncDetails, AsyncLine, AsyncLineDetails, AsyncToken
from lmi_server.dialects.routes import INVOCATIONS


class _Sequence:
    """What the deltas of a sequence add up to."""

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._prompt = options.prompt
        self._texts: list[str] = []
        self._prefill: list[AsyncToken] = []
        self._tokens: list[AsyncToken] = []
        self._end: Delta | None = None

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        if self._prompt is None:
            self._prompt = delta.prompt_text
        if delta.finish_reason is not None:
            self._end = delta

    def add_tokens(self, delta: Delta) -> None:
        self._tokens += [AsyncToken(token.id, token.text, token.logprob) for token in delta.tokens]
        for token in delta.prompt_tokens or ():
            if token.logprob is not None:  # the first has none, and the service leaves it out
                self._prefill.append(AsyncToken(token.id, token.text, token.logprob))

    @property
    def likelihood(self) -> float:
        """The mean log probability per token."""
        return sum(token.logprob or 0.0 for token in self._tokens) / max(len(self._tokens), 1)

    def text(self) -> str:
        return ((self._prompt or "") if self._options.full_text else "") + "".join(self._texts)

    def details(self) -> AsyncDetails:
        end = self._ended()
        assert end.usage is not None
        assert end.finish_reason is not None
        return AsyncDetails(
            FINISH[end.finish_reason],
            end.usage.completion_tokens,
            self._options.seed,
            self._prefill,
            self._tokens,
            note=room_note(end.usage),
        )

    def as_other(self) -> AsyncDetails:
        """Return this sequence as one of `best_of_sequences`."""
        details = self.details()
        details.generated_text = self.text()
        return details

    def line_details(self) -> AsyncLineDetails:
        end = self._ended()
        assert end.usage is not None
        assert end.finish_reason is not None
        return AsyncLineDetails(
            FINISH[end.finish_reason],
            self._options.seed,
            end.usage.completion_tokens,
            end.usage.prompt_tokens,
            room_note(end.usage),
        )

    def _ended(self) -> Delta:
        assert self._end is not None, "every sequence has a last delta"
        return self._end


class _AsyncExchange(Exchange):
    """What answers with and without a stream have in common."""

    def __init__(
        self, requests: tuple[GenerationRequest, ...], options: AnswerOptions, warnings: tuple[str, ...]
    ) -> None:
        self.requests = requests
        self.warnings = warnings
        self._options = options
        self._sequences = [_Sequence(options) for _ in requests]

    def error_chunk(self, error: LmiServerError) -> bytes:
        return error_event(INVOCATIONS, self.content_type, error)


class AsyncJsonExchange(_AsyncExchange):
    """One JSON object at the end."""

    stream = False
    content_type = "application/json"

    def add(self, index: int, delta: Delta) -> bytes:
        self._sequences[index].add(delta)
        if self._options.details:
            self._sequences[index].add_tokens(delta)
        return b""

    def body(self) -> bytes:
        best, *others = ranked(self._sequences, self._options)
        answer = AsyncAnswer(best.text())
        if self._options.details:
            answer.details = best.details()
            if others:
                answer.details.best_of_sequences = [other.as_other() for other in others]
        return encode(answer)


class AsyncLinesExchange(_AsyncExchange):
    """A line per token of each sequence; the last line of a sequence has its text, and `details` if they are wanted."""

    stream = True
    content_type = JSON_LINES.content_type

    def add(self, index: int, delta: Delta) -> bytes:
        self._sequences[index].add(delta)
        tokens = delta.tokens
        if not tokens:
            if not delta.text and delta.finish_reason is None:
                return b""
            tokens = (NO_TOKEN,)
        # Nearly every delta has one token and does not end its sequence.
        if len(tokens) == 1 and delta.finish_reason is None:
            token = tokens[0]
            return encode_line(AsyncLine(index, AsyncToken(token.id, delta.text, token.logprob))) + b"\n"
        lines = [
            AsyncLine(index, AsyncToken(token.id, text, token.logprob))
            for token, text in zip(tokens, token_texts(delta), strict=True)
        ]
        if delta.finish_reason is not None:
            self._end(lines[-1], self._sequences[index])
        return b"".join(encode_line(line) + b"\n" for line in lines)

    def _end(self, line: AsyncLine, sequence: _Sequence) -> None:
        line.generated_text = sequence.text()
        if self._options.details:
            line.details = sequence.line_details()
