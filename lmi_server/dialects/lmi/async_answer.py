"""Writes answers in the shape of LMI's asynchronous service, which serves vLLM with `option.async_mode`.

A stream is JSON lines with the same keys on every line. Where that service says less than it knows, the answer says it:
`finish_reason` is not the stop sequence, and `generated_tokens` of a stream counts every token once.
"""

from __future__ import annotations

from lmi_server.contract.generation import Delta, Token, Usage
from lmi_server.dialects.framing import JSON_LINES, encode_line
from lmi_server.dialects.lmi.answer import (
    NO_TOKEN,
    CollectedSequence,
    JsonExchange,
    LmiExchange,
    room_note,
    token_texts,
)
from lmi_server.dialects.lmi.objects import AsyncAnswer, AsyncDetails, AsyncLine, AsyncLineDetails, AsyncToken
from lmi_server.dialects.parameters.choices import FINISH


class _AsyncSequence(CollectedSequence):
    """A sequence with details in the form of the asynchronous service."""

    def whole_details(self) -> AsyncDetails:
        finish, usage = self._end()
        # The first token of the prompt has no log probability, and the service leaves it out.
        prefill = [_token(token) for token in self.prompt_tokens if token.logprob is not None]
        tokens = [_token(token) for token, _ in self.tokens]
        note = room_note(usage)
        return AsyncDetails(finish, usage.completion_tokens, self.options.seed, prefill, tokens, note=note)

    def line_details(self) -> AsyncLineDetails:
        finish, usage = self._end()
        note = room_note(usage)
        return AsyncLineDetails(finish, self.options.seed, usage.completion_tokens, usage.prompt_tokens, note)

    def _end(self) -> tuple[str, Usage]:
        assert self.end is not None, "every sequence has a last delta"
        assert self.end.finish_reason is not None
        assert self.end.usage is not None
        return FINISH[self.end.finish_reason], self.end.usage


def _token(token: Token) -> AsyncToken:
    return AsyncToken(token.id, token.text, token.logprob)


class AsyncJsonExchange(JsonExchange):
    """One JSON object at the end."""

    sequence_type = _AsyncSequence
    answer_type = AsyncAnswer


class AsyncLinesExchange(LmiExchange):
    """A line per token of each sequence; the last line of a sequence has its text, and `details` if they are wanted."""

    stream = True
    content_type = JSON_LINES.content_type
    sequence_type = _AsyncSequence

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
            lines[-1].generated_text = self._sequences[index].text()
            if self._options.details:
                lines[-1].details = self._sequences[index].line_details()
        return b"".join(encode_line(line) + b"\n" for line in lines)
