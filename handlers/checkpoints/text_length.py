"""How many tokens a text has at least. Its characters show that before anything is tokenized."""

from __future__ import annotations

import json
from typing import Any

from lmi_server.contract.errors import ContextLengthError

LONG_TEXT_CHARS = 20_000
"""Shorter texts are tokenized at once, in milliseconds."""

_ALWAYS_CHARS = 1_000_000  # take a tokenizer about a second
_TOKEN_CHARS = 256  # of a tokenizer whose longest token is not known: so long is none on average

_ASCII = "".join(map(chr, range(0x80)))
# Two bytes each in UTF-8. The second ones are all bytes that may follow the first one of a character.
_CONTINUATIONS = "".join(map(chr, range(0x80, 0xC0)))

# The steps of a tokenizer that leave every character of a text in some token, with the most characters of one token.
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
        self._dropped_characters = _dropped_characters(backend) if self.longest_token else ()
        self._counts_words = backend is not None and _counts_words(backend)

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`; it is 0 if there is none, or the text is short."""
        if len(text) <= LONG_TEXT_CHARS:
            return 0
        if self.longest_token:
            return -(-(len(text) - sum(map(text.count, self._dropped_characters))) // self.longest_token)
        # BERT drops control characters; str.split() takes some of them for spaces.
        if self._counts_words and text.isascii() and text.translate(_TO_SPACES).isprintable():
            return len(text.split())
        return 0

    def max_chars(self, limit: int) -> int:
        """Return how many characters are tokenized for a model whose context has `limit` tokens; 0 for any number."""
        return limit and max(_ALWAYS_CHARS, limit * (self.longest_token or _TOKEN_CHARS))

    def check_size(self, size: int, limit: int) -> None:
        """Raise ContextLengthError if a text of `size` characters is too long to be tokenized."""
        most = self.max_chars(limit)
        if most and size > most:
            least = f", which are at least {-(-size // self.longest_token)} tokens" if self.longest_token else ""
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens. However, the prompt has {size}"
                f" characters{least}; at most {most} characters are tokenized. Please shorten the prompt.",
                limit=limit,
            )

    def check(self, text: str, limit: int) -> None:
        """Raise ContextLengthError if a prompt has `limit` tokens or more in any case, which leaves no room."""
        self.check_size(len(text), limit)
        # The beginning of a text says enough, and takes no more than milliseconds however long the text is.
        enough = max(2 * limit * self.longest_token, 2 * LONG_TEXT_CHARS)
        least = self.min_tokens(text[:enough] if self.longest_token else text)
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
        knows_all = vocabulary.keys() >= set(_symbols(_CONTINUATIONS)[1::2])
    else:
        knows_all = backend.model.byte_fallback
    # Added tokens may take any amount of the space around them.
    strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    if strips or not (knows_all or backend.model.unk_token):
        return 0
    return max(_COMPLETE.get(step["type"], 1) for step in [*steps, {"type": ""}]) * max(map(len, vocabulary))


def _dropped_characters(backend: Any) -> tuple[str, ...]:
    """Return the characters that a tokenizer of bytes drops, because it lacks their symbols.

    Tokenizers trained on texts may lack control characters, as SmolLM2's does. Bytes that are in no
    text, or begin rare characters, may be missing as well. The other bytes of a character have their tokens then.
    """
    steps = [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
    if backend.model.unk_token or not any(step["type"] == "ByteLevel" for step in steps):
        return ()
    symbols = zip(_ASCII, _symbols(_ASCII), strict=True)
    return tuple(character for character, symbol in symbols if backend.token_to_id(symbol) is None)


def _symbols(text: str) -> str:
    """Return the characters that stand for the bytes of a text in tokens of bytes."""
    from tokenizers import pre_tokenizers

    [(symbols, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return str(symbols)


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
