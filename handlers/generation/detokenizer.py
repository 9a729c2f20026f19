"""Token ids to text, token by token: never an incomplete character, never a part of a possible stop sequence.

Also for engines with a detokenizer of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from handlers.generation.token_pieces import TokenPieces

_CONTEXT = 8  # prompt tokens to decode the first output token with, for its leading space
_LONGEST_CHARACTER = 16  # tokens; if so many complete no character, the model wrote invalid UTF-8


class TokenTexts:
    """The texts of single tokens, each decoded on first use and then kept; `pieces` are what they add to a text."""

    def __init__(
        self, decode: Callable[[list[int]], str], special_ids: Sequence[int], pieces: TokenPieces | None = None
    ) -> None:
        self.decode = decode
        self.pieces = pieces
        self.special_ids = frozenset(special_ids)
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """Return the text of one token, decoded alone."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id])
        return text


@dataclass(slots=True)
class StopMatcher:
    """Finds stop sequences in a growing text and holds back what may become one. `found` is the sequence found."""

    stops: tuple[str, ...]
    include_stop: bool = False
    held: str = ""
    found: str | None = None

    def feed(self, piece: str, ends: bool = True) -> tuple[str, bool]:
        """Add `piece`; return the text that is safe to emit, and whether a stop sequence was found.

        A stop sequence that `piece` completes counts only if it `ends` the text.
        """
        if not self.stops:
            return piece, False
        text = self.held + piece
        at_all = ((at, stop) for stop in self.stops if ends and (at := text.find(stop)) >= 0)
        found = min(at_all, default=None)
        if found:
            at, stop = found
            self.held, self.found = "", stop
            return text[: at + len(stop) if self.include_stop else at], True
        keep = max(_overlap(text, stop) for stop in self.stops)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        held, self.held = self.held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class IncrementalDetokenizer:
    """Decodes the output of one request. `feed` returns the text that a token completes, possibly none.

    A token has no text of its own: a decoder strips the leading space of the first token that it is given, and a
    character may take several tokens of bytes. Decoding the whole output for every token would take quadratic time. So
    new tokens are decoded together with the few before them, and the text of those is cut off. `pieces` spares that for
    most tokens.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], skip_special_tokens: bool, pieces: TokenPieces | None = None
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
        self._decode: Callable[[list[int]], str] = lambda ids: backend.decode(
            ids, skip_special_tokens=skip_special_tokens
        )
        self._before = list(prompt[-_CONTEXT:])
        self._before_text: str | None = self._decode(self._before)  # None: not decoded yet
        self._pending: list[int] = []
        self._piece = None if pieces is None else pieces.piece
        self._is_whole = _is_whole(self._before_text)  # the text so far ends with a whole character

    def feed(self, token: int) -> str:
        """Add a token; return the text that is complete with it."""
        if self._is_whole and self._piece is not None and (piece := self._piece(token)) is not None:
            self._before, self._before_text = [token], None
            return piece
        self._is_whole = False
        if self._before_text is None:
            self._before_text = self._decode(self._before)
        self._pending.append(token)
        text = self._decode(self._before + self._pending)
        unfinished = text.endswith("\ufffd") and len(self._pending) < _LONGEST_CHARACTER
        if unfinished or len(text) <= len(self._before_text):
            return ""
        return self._emit(text)

    @classmethod
    def texts(cls, tokenizer: Any, ids: Sequence[int]) -> list[str]:
        """Return the text that each token of a prompt adds: they join to its text. Parts of a character have none."""
        detokenizer = cls(tokenizer, [], skip_special_tokens=False)
        texts = [detokenizer.feed(token) for token in ids]
        if texts:
            texts[-1] += detokenizer.flush()
        return texts

    def flush(self) -> str:
        """Return the text of tokens that never completed a character, with replacement characters as `decode` gives."""
        return self._emit(self._decode(self._before + self._pending)) if self._pending else ""

    def _emit(self, text: str) -> str:
        assert self._before_text is not None, "feed decodes it"
        piece = text[len(self._before_text) :]
        self._before, self._pending = self._pending, []
        self._before_text = self._decode(self._before)
        self._is_whole = _is_whole(self._before_text)
        return piece


def _is_whole(text: str) -> bool:
    return bool(text) and not text.endswith("\ufffd")
