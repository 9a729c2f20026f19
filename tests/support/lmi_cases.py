"""What LMI's requests get from any engine that decodes in a rolling batch. The model has a tokenizer of bytes."""

from __future__ import annotations

import json
import string
from typing import Any

import httpx
from tiny_models import CONTEXT, byte_tokenizer

IDS = dict(zip(string.ascii_lowercase, byte_tokenizer().encode(string.ascii_lowercase), strict=True))
LETTERS = list(IDS.values())


def generated(http: httpx.Client, inputs: Any = "hello", **parameters: Any) -> str:
    """Return the text that a greedy request of 12 tokens gets."""
    return str(answer(http, {"inputs": inputs, "parameters": {"max_new_tokens": 12, **parameters}})["generated_text"])


def answer(http: httpx.Client, body: dict[str, Any]) -> Any:
    reply = http.post("/invocations", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(http: httpx.Client, inputs: Any = "hello", **parameters: Any) -> str:
    """Return the message with which a request is refused."""
    reply = http.post("/invocations", json={"inputs": inputs, "parameters": parameters})
    assert reply.status_code == 424, reply.text
    return str(reply.json()["message"])


def lines(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of a streamed answer in JSON lines."""
    reply = http.post("/invocations", json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def check_sampling_parameters(http: httpx.Client) -> None:
    """Hold that each parameter changes the text in the way that its name says."""
    only_letters = {"allowed_token_ids": LETTERS}
    text = generated(http, **only_letters)
    assert len(text) == 12
    assert text.isalpha()
    assert generated(http, **only_letters, max_tokens=3, max_new_tokens=None) == text[:3]
    assert generated(http, **only_letters, stop_strings=[text[2:4]]) == text[: text.index(text[2:4])]
    assert text[0] not in generated(http, **only_letters, bad_words=[text[0]])
    assert text[:3] not in generated(http, **only_letters, bad_words=[text[:3]])
    assert generated(http, **only_letters, logit_bias={str(IDS["z"]): 100}) == "z" * 12
    ended = answer(
        http,
        {
            "inputs": "hello",
            "parameters": {**only_letters, "max_new_tokens": 12, "eos_token_id": IDS[text[0]], "details": True},
        },
    )
    assert ended["details"]["generated_tokens"] == 1
    later = generated(http, allowed_token_ids=[*LETTERS, 258], logit_bias={"258": 100}, min_new_tokens=5)
    assert len(later) == 5
    assert generated(http, allowed_token_ids=[*LETTERS, 258], logit_bias={"258": 100}) == ""
    stop = text[1]
    end = text.find(stop, 6)
    assert generated(http, **only_letters, stop=[stop], min_tokens=6) == (text if end < 0 else text[:end])


def check_token_texts(http: httpx.Client) -> None:
    """Hold that the tokens of log probabilities join to the text, although their characters take several tokens."""
    body = {
        "prompt": "naïve €: ",
        "echo": True,
        "logprobs": 0,
        "max_tokens": 30,
        "structured_outputs": {"regex": "[é€🎉]{6}"},
    }
    for more in ({}, {"temperature": 0}):
        (choice,) = http.post("/v1/completions", json={**body, **more}).json()["choices"]
        tokens = choice["logprobs"]["tokens"]
        assert "".join(tokens).removesuffix(byte_tokenizer().decode([258])) == choice["text"]
        assert len(tokens) > len(choice["text"])
        assert choice["logprobs"]["text_offset"] == [len("".join(tokens[:at])) for at in range(len(tokens))]


def check_refused_parameters(http: httpx.Client) -> None:
    """Hold that a parameter that no engine applies is refused by its name."""
    for name, value in {
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[5]],
        "max_length": 20,
        "flat_logprobs": True,
        "suppress_tokens": [5],
        "watermark": True,
    }.items():
        assert f"parameters.{name}" in refusal(http, **{name: value})
    assert "allowed_token_ids" in refusal(http, allowed_token_ids=[])


def check_several_sequences(http: httpx.Client) -> None:
    """Hold that `n` gives different sequences with sampling, and is refused without."""
    parameters = {"n": 3, "do_sample": True, "temperature": 2.0, "seed": 3, "max_new_tokens": 6, "ignore_eos": True}
    whole = answer(http, {"inputs": "hello", "parameters": parameters})
    texts = [whole["generated_text"], *(other["generated_text"] for other in whole["details"]["best_of_sequences"])]
    assert len(set(texts)) == 3
    assert lines(http, {"inputs": "hello", "parameters": parameters})[-1]["generated_text"] == texts[0]
    assert "parameters.n: 3 is not allowed; send do_sample=true" in refusal(http, n=3)


def check_prompts(http: httpx.Client) -> None:
    """Hold that a prompt is a text, its tokens, or a list of one of them."""
    tokens = byte_tokenizer().encode("hello")
    text = generated(http, return_full_text=True)
    for prompt in (["hello"], tokens, [tokens]):
        assert generated(http, prompt, return_full_text=True) == text
    assert "send one request for each prompt" in refusal(http, ["a", "b"])


def check_length(http: httpx.Client) -> None:
    """Hold that more new tokens than the context has room for become fewer, and that the details say so."""
    long = {"max_new_tokens": 9000, "ignore_eos": True, "details": True}
    details = answer(http, {"inputs": "hello" * 50, "parameters": long})["details"]
    assert details["generated_tokens"] == CONTEXT - 250
    assert details["note"].startswith(f"max_new_tokens was lowered to {CONTEXT - 250}: the prompt has 250 tokens")
    assert lines(http, {"inputs": "hello" * 50, "parameters": long})[-1]["details"]["note"] == details["note"]
    assert "note" not in answer(http, {"inputs": "hello", "parameters": {"details": True}})["details"]
    assert http.post("/invocations", json={"inputs": "a" * 300}).status_code == 424


def check_prompt_logprobs(http: httpx.Client) -> None:
    """Hold that prompt_logprobs shows the log probabilities of the prompt."""
    parameters = {"prompt_logprobs": 1, "details": True, "max_new_tokens": 1}
    prefill = answer(http, {"inputs": "hello", "parameters": parameters})["details"]["prefill"]
    assert [token["id"] for token in prefill] == byte_tokenizer().encode("hello")
    assert prefill[0]["log_prob"] is None
    assert all(token["log_prob"] < 0 for token in prefill[1:])
