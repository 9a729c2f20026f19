"""The least number of tokens of a text, which decides what is refused before it is tokenized."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_models import byte_tokenizer, sentencepiece_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from handlers.checkpoints import text_length
from handlers.checkpoints.text_length import TextLength
from lmi_server.contract.errors import ContextLengthError

TEXTS = st.text() | st.text("ab \n\t.\x04é\u0301\u1f82\u200b中\U00040000", max_size=200)


def wordpiece(strip: bool = False) -> PreTrainedTokenizerFast:
    vocabulary = {"[UNK]": 0, "a": 1, "##b": 2, ".": 3}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if strip:
        backend.add_special_tokens([AddedToken("[a b]")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def composing() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def stripping() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def lacking() -> PreTrainedTokenizerFast:
    """Return a tokenizer that drops a control character, and the first byte of rare characters, as SmolLM2's does."""
    known = byte_tokenizer().get_vocab()
    left = [token for token in sorted(known, key=known.__getitem__) if token not in (ENQUIRY, RARE)]
    backend = Tokenizer(models.BPE({token: place for place, token in enumerate(left)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


ENQUIRY, RARE = "\u0104", "\u00f1"  # the symbols of the bytes 04 and F1
TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "lacking": lacking(),
    "composing": composing(),
    "stripping": stripping(),
    "sentencepiece": sentencepiece_tokenizer(),
    "wordpiece": wordpiece(),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(TEXTS)
@example("0\x1f")  # a space for Python, and nothing for BERT
@example("0\x0b")
@example("a\x04\U00040000")
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    long = text * (text_length.LONG_TEXT_CHARS // max(len(text), 1) + 1) if len(text) < 4 else text
    length = TextLength(tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_length, "LONG_TEXT_CHARS", 0)
        assert length.min_tokens(long) <= len(tokenizer.encode(long, add_special_tokens=False))


def test_the_bound_is_known_where_it_can_be() -> None:
    known: dict[str, Any] = {name: TextLength(found).min_tokens("a b" * 10_000) for name, found in TOKENIZERS.items()}
    assert known == {
        "bytes": 6000,
        "lacking": 6000,
        "composing": 1500,
        "stripping": 0,
        "sentencepiece": 5000,
        "wordpiece": 10_001,
    }
    assert TextLength(lacking()).min_tokens("ab\x04" * 10_000) == 4000
    assert TextLength(wordpiece(strip=True)).min_tokens("a b" * 10_000) == 0
    assert TextLength(None).min_tokens("a b" * 10_000) == 0


def test_the_error_says_how_long_the_text_is() -> None:
    length = TextLength(byte_tokenizer())
    length.check("a" * 30_000, 6001)
    with pytest.raises(ContextLengthError, match=r"maximum context length is 6000 .* 30000 characters, .* least 6000 "):
        length.check("a" * 30_000, 6000)
