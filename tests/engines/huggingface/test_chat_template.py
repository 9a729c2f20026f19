"""option.chat_template: a template, or a file of the model directory, which may ask for what begins a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from handlers.checkpoints.chat_template import read_chat_template, with_prompt_beginning
from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.generation import PROMPT_BEGINNING


class Tokenizer:
    """A token per letter; `before` and `after` are the special tokens that it adds to a prompt."""

    def __init__(self, before: str, after: str = "") -> None:
        self._before, self._after = before, after

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in (f"{self._before}{text}{self._after}" if add_special_tokens else text)]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def test_a_template_is_a_text_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    assert read_chat_template("chat.jinja", tmp_path) == read_chat_template("{{ messages }}", tmp_path)
    with pytest.raises(ModelLoadError, match="is neither a file nor a template"):
        read_chat_template("missing.jinja", tmp_path)


def test_a_template_begins_as_the_tokenizer_begins_a_prompt() -> None:
    template = PROMPT_BEGINNING + "{{ x }}"
    assert with_prompt_beginning(template, Tokenizer("^")) == '{{- "^" -}}{{ x }}'
    assert with_prompt_beginning(template, Tokenizer("", "$")) == '{{- "" -}}{{ x }}'
    assert with_prompt_beginning("{{ x }}", Tokenizer("^")) == "{{ x }}"
