"""How many tokens a text has at least. Its characters show that before anything is tokenized."""

from __future__ import annotations

import json
from typing import Any

from lmi_server.contract.errors import ContextLengthError

LONG_TEXT_CHARS = 20_000
"""Shorter texts are tokenized at once, in milliseconds."""

_BYTES = 256

# The steps of a tokenizer that leave every character of a text in some token, with the most characters that become one.
# NFC joins up to four: a Greek letter with three accents.
_COMPLETE = {"Prepend": 1, "Lowercase": 1, "NFD": 1, "NFKD": 1, "NFC": 4, "NFKC": 4}
_COMPLETE |= dict.fromkeys(("ByteLevel", "Digits", "Metaspace", "Split"), 1)

# The steps that leave every word of printable ASCII in a token of its own.
_BY_WORD = frozenset({"BertNormalizer", "BertPreTokenizer", "Whitespace", "WhitespaceSplit", "Lowercase"})
_TO_SPACES = str.maketrans("\t\n\r", "   ")


class TextLength:
    """Knows what a tokenizer does with a text of any length.

    `longest_token` is in characters; 0 if any number of characters may become one token, or none.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.longest_token = 0 if backend is None else _longest_token(backend)
        self._counts_words = backend is not None and _counts_words(backend)

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`; it is 0 if there is none, or the text is short."""
        if len(text) <= LONG_TEXT_CHARS:
            return 0
        if self.longest_token:
            return -(-len(text) // self.longest_token)
        # BERT drops control characters, of which str.split() takes some for spaces.
        if self._counts_words and text.isascii() and text.translate(_TO_SPACES).isprintable():
            return len(text.split())
        return 0

    def check(self, text: str, limit: int) -> None:
        """Raise ContextLengthError if a prompt has `limit` tokens or more in any case, which leaves no room."""
        least = self.least_tokens(text)
        if limit and least >= limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens. However, the prompt has {len(text)}"
                f" characters, which are at least {least} tokens. Please shorten the prompt.",
                least,
                0,
                limit,
            )


def _longest_token(backend: Any) -> int:
    from tokenizers import models

    steps = [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
    if not isinstance(backend.model, models.BPE) or backend.model.fuse_unk or not all(map(_is_complete, steps)):
        return 0
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if any(step["type"] == "ByteLevel" for step in steps):
        knows_all = sum(symbol in vocabulary for symbol in _byte_symbols()) == _BYTES
    else:
        knows_all = backend.model.byte_fallback
    # Added tokens may take any amount of the space around them.
    strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    if strips or not (knows_all or backend.model.unk_token):
        return 0
    return max(_COMPLETE.get(step["type"], 1) for step in [*steps, {"type": ""}]) * max(map(len, vocabulary))


def _byte_symbols() -> list[str]:
    from tokenizers import pre_tokenizers

    return list(pre_tokenizers.ByteLevel.alphabet())


def _is_complete(step: dict[str, Any]) -> bool:
    """Return whether a step of the tokenizer drops no characters."""
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "  ")) <= len(step["content"])
    return step["type"] in _COMPLETE and step.get("behavior") != "Removed"


def _counts_words(backend: Any) -> bool:
    from tokenizers import models

    steps = [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
    added = backend.get_added_tokens_decoder().values()
    return (
        isinstance(backend.model, models.WordPiece)
        and backend.pre_tokenizer is not None
        and all(step["type"] in _BY_WORD for step in steps)
        and all(token.content.split() == [token.content] for token in added)
    )


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer as tokenizer.json has them."""
    return [] if part is None else _flat(json.loads(part.__getstate__()))


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    inner = step.get("normalizers") or step.get("pretokenizers") or ()
    return [flat for one in inner for flat in _flat(one)]
