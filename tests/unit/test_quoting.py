"""What a message shows of a text that somebody else has written."""

from __future__ import annotations

import pytest

from lmi_server.contract.quoting import excerpt


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


def test_a_long_text_is_cut_and_says_so() -> None:
    assert excerpt("x" * 1_000_000, 5) == "xxxxx... (1000000 characters)"
    assert excerpt("\n" * 101) == r"\n" * 100 + "... (101 characters)"
    assert excerpt("x" * 100) == "x" * 100
