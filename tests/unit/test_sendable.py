"""Texts that a border would refuse: lone surrogates, and messages of any length."""

from __future__ import annotations

import pytest

from lmi_server.contract.errors import HandlerError, describe, failure_of, first_line
from lmi_server.contract.texts.quoting import LONGEST_MESSAGE, sendable
from lmi_server.contract.texts.sendable import json_bytes


@pytest.mark.parametrize(
    ("text", "sent"),
    [("plain", "plain"), ("größe 日本 😀", "größe 日本 😀"), ("a\ud800b", "a\\ud800b"), ("\udcff\0", "\\udcff\0")],
)
def test_only_lone_surrogates_become_escapes(text: str, sent: str) -> None:
    assert sendable(text) == sent


def test_json_has_escapes_in_keys_and_values_at_any_depth() -> None:
    assert json_bytes({"\ud800": [{"a": ("\udfff", b"b")}]}) == rb'{"\\ud800":[{"a":["\\udfff","Yg=="]}]}'


def test_the_message_of_an_error_is_bounded_and_can_be_encoded() -> None:
    error = HandlerError("\ud800" + "x" * 100_000_000)
    assert len(error.message) < LONGEST_MESSAGE + 100
    assert error.message.startswith("\\ud800x")
    assert error.message.endswith("x... (100000001 characters)")


class NamelessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_without_a_text_has_the_name_of_its_class() -> None:
    assert describe(NamelessError()) == failure_of(NamelessError()).message == "NamelessError"


def test_a_report_of_one_line_has_the_first_line_that_says_something() -> None:
    assert first_line(ImportError("\nPIL is missing\nInstall it")) == "ImportError: PIL is missing"
    assert first_line(ValueError("\n")) == "ValueError"
