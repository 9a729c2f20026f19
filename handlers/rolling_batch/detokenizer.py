"""Token ids to text, step by step: never half a character, never a part of a possible stop sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

_CONTEXT = 8  # prompt tokens that the first output token is decoded after, for its leading space


@dataclass(slots=True)
class StopMatcher:
    """Finds stop sequences in a growing text and holds back what may become one."""

    stops: tuple[str, ...]
    include_stop: bool = False
    held: str = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """Add `piece`; return the text that is safe to emit, and whether a stop sequence was found."""
        if not self.stops:
            return piece, False
        text = self.held + piece
        found = min(((at, stop) for stop in self.stops if (at := text.find(stop)) >= 0), default=None)
        if found:
            at, stop = found
            self.held = ""
            return text[: at + len(stop) if self.include_stop else at], True
        keep = max(_overlap(text, stop) for stop in self.stops)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """Return what was held back; the text is over."""
        held, self.held = self.held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class IncrementalDetokenizer:
    """Decodes the output of one request. `feed` returns the text that a token completes, maybe none."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._feed: Callable[[int], str]
        backend = getattr(tokenizer, "_tokenizer", None)
        context = list(prompt[-_CONTEXT:])
        if backend is not None:
            stream = DecodeStream(ids=context, skip_special_tokens=skip_special_tokens)
            self._feed = lambda token: stream.step(backend, token) or ""
        else:
            self._feed = _SlowStream(tokenizer, context, skip_special_tokens).step
        self._tokenizer = tokenizer
        self._tail: list[int] = []
        self._skip_special_tokens = skip_special_tokens

    def feed(self, token: int) -> str:
        """Add a token; return the text that is complete with it."""
        piece = self._feed(token)
        self._tail = [] if piece else [*self._tail, token]
        return piece

    def flush(self) -> str:
        """Return the text of tokens that never completed a character: with replacement characters, as decode has."""
        tail, self._tail = self._tail, []
        return self._tokenizer.decode(tail, skip_special_tokens=self._skip_special_tokens) if tail else ""


class _SlowStream:
    """The same for a tokenizer without a fast backend: decodes a short window again for every token."""

    def __init__(self, tokenizer: Any, context: list[int], skip_special_tokens: bool) -> None:
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        self._ids = context
        self._read = len(context)

    def step(self, token: int) -> str:
        self._ids.append(token)
        before, after = self._decode(self._ids[: self._read]), self._decode(self._ids)
        if after.endswith("\ufffd") or len(after) <= len(before):
            return ""
        self._ids = self._ids[max(0, self._read - _CONTEXT) :]
        self._read = len(self._ids)
        return after[len(before) :]
