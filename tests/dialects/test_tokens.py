from __future__ import annotations

import json
from typing import Any

import pytest
from dialect_helpers import SERVED, request

from lmi_server.contract.errors import ModelNotFoundError, RequestError
from lmi_server.dialects.vllm import tokens


def test_a_prompt() -> None:
    asked, warnings = tokens.parse_tokenize(request("tokenize", {"model": "tiny", "prompt": "Hello", "x": 1}), SERVED)
    assert (asked.prompt, asked.messages, asked.add_special_tokens) == ("Hello", None, True)
    assert warnings == ("x is not known and is ignored",)
    plain, _ = tokens.parse_tokenize(request("tokenize", {"prompt": "", "add_special_tokens": False}), SERVED)
    assert (plain.prompt, plain.add_special_tokens) == ("", False)


def test_a_chat() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "add_generation_prompt": False}
    asked, _ = tokens.parse_tokenize(request("tokenize", body), SERVED)
    assert asked.messages == [{"role": "user", "content": "Hi"}]
    assert not asked.chat.add_generation_prompt
    assert not asked.add_special_tokens, "a template writes its own"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, '"prompt"'),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, '"messages"'),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "return_token_strs": True}, "return_token_strs"),
    ],
)
def test_what_cannot_be_tokenized(body: Any, expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        tokens.parse_tokenize(request("tokenize", body), SERVED)
    assert expected in caught.value.message


@pytest.mark.parametrize("body", [{}, {"tokens": "1"}, {"tokens": [-1]}, {"tokens": [1.5]}])
def test_what_cannot_be_turned_into_text(body: Any) -> None:
    with pytest.raises(RequestError, match="tokens"):
        tokens.parse_detokenize(request("detokenize", body), SERVED)


def test_another_model_is_refused() -> None:
    with pytest.raises(ModelNotFoundError):
        tokens.parse_tokenize(request("tokenize", {"model": "other", "prompt": "a"}), SERVED)


def test_bodies() -> None:
    assert json.loads(tokens.tokens_body([5, 6], SERVED)) == {"count": 2, "max_model_len": 0, "tokens": [5, 6]}
    assert json.loads(tokens.text_body("é")) == {"prompt": "é"}
