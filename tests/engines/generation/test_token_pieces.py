"""Pieces of single tokens join to what decoding each token with the ones before it gives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT
from tiny_models import byte_tokenizer, sentencepiece_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from handlers.generation.detokenizer import IncrementalDetokenizer
from handlers.generation.token_pieces import TokenPieces

DEMO_MODEL = ROOT / "models" / "smollm2-135m-instruct"


def with_decoder(decoder: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are awkward for any decoder."""
    byte_tokens = ["<0xE6>", "<0x97>", "<0xA5>", "<0x41>"]
    words = ["▁a", "b", "▁", "▁▁", *byte_tokens, "\ufffd", "x\ufffd", "é", "Ã©", "Ã", "©", " c"]
    backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.add_special_tokens(["<s>"])
    backend.add_tokens([AddedToken("<think> ü", special=False), AddedToken("▁añadido", special=False)])
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend)


LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
TOKENIZERS: dict[str, Any] = {
    "bytes": byte_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "byte level": lambda: with_decoder(decoders.ByteLevel()),
    "llama": lambda: with_decoder(decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)])),
    "gemma": lambda: with_decoder(decoders.Sequence(LLAMA)),
    "metaspace": lambda: with_decoder(decoders.Metaspace()),
    "word pieces": lambda: with_decoder(decoders.WordPiece()),
    "demo model": lambda: AutoTokenizer.from_pretrained(DEMO_MODEL),
}


@functools.cache
def loaded(name: str) -> Any:
    if name == "demo model" and not DEMO_MODEL.exists():
        pytest.skip("make demo-model")
    return TOKENIZERS[name]()


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_random_tokens_give_the_same_texts(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = loaded(name)
    tokens = st.lists(st.integers(0, len(tokenizer) + 1), max_size=40)
    prompt, output = data.draw(tokens), data.draw(tokens)
    fast = IncrementalDetokenizer(tokenizer, prompt, skip, TokenPieces(tokenizer))
    slow = IncrementalDetokenizer(tokenizer, prompt, skip)
    for token in output:
        assert fast.feed(token) == slow.feed(token)
    assert fast.flush() == slow.flush()


@pytest.mark.parametrize("name", ["bytes", "byte level", "llama", "gemma", "metaspace", "demo model"])
def test_most_tokens_have_a_piece(name: str) -> None:
    tokenizer = loaded(name)
    pieces = TokenPieces(tokenizer)
    found = [pieces.piece(token) for token in range(len(tokenizer))]
    assert sum(piece is not None for piece in found) >= len(found) / 3


def test_decoders_that_change_every_token_have_no_pieces() -> None:
    tokenizer = loaded("word pieces")
    assert not any(TokenPieces(tokenizer).piece(token) for token in range(len(tokenizer)))
