"""What a message shows of a text that somebody else has written."""

from __future__ import annotations

import pytest

from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.texts.quoting import as_record, excerpt, one_line, shorten


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("my-model", "my-model"),
        ("Modell für Züge 模型", "Modell für Züge 模型"),
        ("a\nINFO forged\r\n", r"a\nINFO forged\r\n"),
        ("\x1b[2Jgone\x00\x7f", r"\x1b[2Jgone\x00\x7f"),
        ("user\u202etxt.exe", r"user\u202etxt.exe"),
        ("half \ud800", r"half \ud800"),
        ("line\u2028end\u0085", r"line\u2028end\x85"),
    ],
)
def test_unprintable_characters_are_escaped(text: str, expected: str) -> None:
    assert excerpt(text) == expected
    excerpt(text).encode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("模型\u3000目录/a\xa0b/👩\u200d🔬", "模型\u3000目录/a\xa0b/👩\u200d🔬"),
        ("\t\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029", r"\t\n\x0b\x0c\r\x1c\x1d\x1e\x85\u2028\u2029"),
        ("\x1b[2J\x9b\x7f\u202egnp\u2066", r"\x1b[2J\x9b\x7f\u202egnp\u2066"),
        ("half \ud800", r"half \ud800"),
    ],
)
def test_a_line_of_a_message_keeps_the_names_of_files(text: str, expected: str) -> None:
    assert one_line(text) == expected


def test_a_long_text_is_cut_and_says_so() -> None:
    assert excerpt("x" * 1_000_000, 5) == "xxxxx... (1000000 characters)"
    assert excerpt("\n" * 101) == r"\n" * 100 + "... (101 characters)"
    assert excerpt("x" * 100) == "x" * 100


def test_a_message_is_cut_behind_a_word() -> None:
    assert shorten("short") == "short"
    assert shorten("a word and more", 12) == "a word and... (15 characters)"
    assert shorten("x" * 9000) == f"{'x' * 8192}... (9000 characters)"


def test_a_record_has_no_line_that_looks_like_another_one() -> None:
    assert as_record("a\nERROR b\r\n\x1b\u202e\u2028\t模") == "a\n  ERROR b\\x0d\n  \\x1b\\u202e\\u2028\t模"


def test_an_error_has_a_message_of_bounded_length() -> None:
    assert len(LmiServerError("x" * 1_000_000).message) < 8300
    assert len(str(LmiServerError("x" * 1_000_000))) < 8300
