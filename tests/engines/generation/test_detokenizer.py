"""Incremental detokenisation: whole characters, whole stop sequences, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import byte_tokenizer, sentencepiece_tokenizer

from handlers.generation.detokenizer import IncrementalDetokenizer, StopMatcher

TOKENIZER = byte_tokenizer()
EOS = 258


def stream(ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(TOKENIZER, [1, 2], skip_special_tokens)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


@given(st.text(min_size=1, max_size=30))
def test_pieces_are_whole_characters_and_join_to_the_text(text: str) -> None:
    pieces = stream(TOKENIZER.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces).replace("\ufffd" if "\ufffd" in text else "", "")


@given(st.lists(st.integers(0, 255), max_size=20))
def test_invalid_utf8_is_not_lost(ids: list[int]) -> None:
    assert "".join(stream(ids)).replace("\ufffd", "") == TOKENIZER.decode(ids).replace("\ufffd", "")


@pytest.mark.parametrize("prompt", ["odd \ufffd", "é", "日本", ""])
def test_the_prompt_never_shows_in_the_output(prompt: str) -> None:
    context = TOKENIZER.encode(prompt, add_special_tokens=False)
    for cut in (context, context[:-1]):
        detokenizer = IncrementalDetokenizer(TOKENIZER, cut, skip_special_tokens=True)
        ids = TOKENIZER.encode(" fine", add_special_tokens=False)
        assert "".join(detokenizer.feed(token) for token in ids).replace("\ufffd", "") == " fine"


@given(st.lists(st.sampled_from(["▁a", "b", "▁", "<0xE6>", "<0x97>", "<0xA5>", "c"]), max_size=20))
def test_sentencepiece_with_byte_fallback_loses_nothing(pieces: list[str]) -> None:
    """The decoder chain of Llama 2 and Mistral: leading spaces, and bytes that may be invalid UTF-8."""
    tokenizer = sentencepiece_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(piece) for piece in pieces]
    prompt = [tokenizer.convert_tokens_to_ids("c")]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=True)
    text = "".join(detokenizer.feed(token) for token in ids) + detokenizer.flush()
    # Bytes before an invalid one may become a character here; decoding the whole text at once drops the whole run.
    expected = tokenizer.decode(prompt + ids)[1:]
    assert text.encode("ascii", "ignore") == expected.encode("ascii", "ignore")
    if "\ufffd" not in expected:
        assert text == expected


def test_a_stop_sequence_may_be_held_off() -> None:
    matcher = StopMatcher(("ab", "x"))
    assert [matcher.feed(piece, ends) for piece, ends in (("cab", False), ("xa", False), ("b", True))] == [
        ("cab", False),
        ("x", False),
        ("", True),
    ]
    assert matcher.found == "ab"


@given(st.text(max_size=20))
def test_the_texts_of_a_prompts_tokens_join_to_it(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    texts = IncrementalDetokenizer.texts(TOKENIZER, ids)
    assert (len(texts), "".join(texts)) == (len(ids), text)


def test_an_unfinished_character_comes_as_a_replacement_at_the_end() -> None:
    ids = TOKENIZER.encode("aé", add_special_tokens=False)[:-1]
    assert stream(ids) == ["a", "", "\ufffd"]


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [*TOKENIZER.encode("a", add_special_tokens=False), EOS]
    assert "".join(stream(ids)) == "a"
    assert "".join(stream(ids, skip_special_tokens=False)) == "a</s>"


@pytest.mark.parametrize(
    ("pieces", "stops", "emitted"),
    [
        (["ab", "cd"], ("bc",), ["a", ""]),
        (["ab", "xd"], ("bc",), ["a", "bxd"]),
        (["a", "b", "c"], ("abc",), ["", "", ""]),
        (["aab", "c"], ("abc",), ["a", ""]),
        (["x stop y"], ("stop",), ["x "]),
        (["one two"], ("two", "one"), [""]),
    ],
)
def test_what_may_become_a_stop_sequence_is_held_back(
    pieces: list[str], stops: tuple[str, ...], emitted: list[str]
) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.feed(piece)[0] for piece in pieces] == emitted


def test_the_stop_sequence_is_included_on_request() -> None:
    assert StopMatcher(("bc",), include_stop=True).feed("abcd") == ("abc", True)


@given(st.lists(st.text("abc", max_size=4), max_size=8), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
def test_any_cut_into_pieces_gives_the_same_text(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    text, stopped = "", False
    for piece in pieces:
        emitted, stopped = matcher.feed(piece)
        text += emitted
        if stopped:
            break
    text += matcher.flush()
    whole = "".join(pieces)
    assert whole.startswith(text)
    assert not any(stop in text for stop in stops)
    assert stopped == any(stop in whole for stop in stops)
    assert stopped or text == whole
