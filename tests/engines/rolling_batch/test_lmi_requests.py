"""LMI's requests to the rolling batch over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import lmi_cases
import pytest
from lmi_cases import IDS, generated, refusal
from product_helpers import serving
from vllm_helpers import make_tiny_model

pytestmark = pytest.mark.slow

LONG = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model = make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")
    options = {"rolling_batch": "scheduler", "max_rolling_batch_size": "8", "kv_cache_memory_gb": "0.1"}
    options["max_json_whitespace"] = "1"
    with serving(tmp_path_factory.mktemp("served"), model, libraries="transformers", **options) as server:
        yield server.http


def test_sampling_parameters_change_the_text(http: httpx.Client) -> None:
    lmi_cases.check_sampling_parameters(http)


def test_what_is_not_applied_is_refused(http: httpx.Client) -> None:
    lmi_cases.check_refused_parameters(http)
    assert "parameters.repetition_detection is not supported" in refusal(http, repetition_detection={"a": 1})


def test_several_sequences_are_sampled(http: httpx.Client) -> None:
    lmi_cases.check_several_sequences(http)


def test_a_prompt_has_four_forms(http: httpx.Client) -> None:
    lmi_cases.check_prompts(http)


def test_the_length_is_lowered_to_what_the_context_holds(http: httpx.Client) -> None:
    lmi_cases.check_length(http)


def test_the_log_probabilities_of_a_prompt_are_shown(http: httpx.Client) -> None:
    lmi_cases.check_prompt_logprobs(http)


def test_the_tokens_of_log_probabilities_join_to_the_text(http: httpx.Client) -> None:
    lmi_cases.check_token_texts(http)


def test_chats_below_invocations_are_openais(http: httpx.Client) -> None:
    """huggingface_hub asks there if /invocations is its address."""
    body = {"model": "tgi", "messages": [{"role": "developer", "content": "Say."}], "max_tokens": 3}
    reply = http.post("/invocations/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["object"]) == (200, "chat.completion")


def test_white_space_of_json_has_the_bound_of_the_model(http: httpx.Client) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 8, "maxItems": 8}
    sampled = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 60}
    assert re.fullmatch(r"\[1(\s?,\s?1){7}\]", generated(http, guided_json=schema, **sampled))
    text = generated(http, guided_json=schema, guided_whitespace_pattern="[ ]{0,3}", **sampled)
    assert re.fullmatch(r"\[1( {0,3}, {0,3}1){7}\]", text)


_SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "London"]}}, "required": ["city"]}
_CLOSED = {**_SCHEMA, "additionalProperties": False}


def test_parameters_constrain_the_output(http: httpx.Client) -> None:
    assert re.fullmatch("[xy]{3}", generated(http, guided_regex="[xy]{3}"))
    assert re.fullmatch("[0-9]{3}", generated(http, grammar={"type": "regex", "value": "[0-9]{3}"}))
    assert generated(http, guided_choice=["sunny", "rainy"]) in ("sunny", "rainy")
    assert generated(http, guided_grammar='root ::= "yes" | "no"') in ("yes", "no")
    described = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": _CLOSED}}
    compact = {"json": _CLOSED, "disable_any_whitespace": True}
    tidy = {str(token): -100 for token in range(256) if token not in IDS.values()}
    for constraint in (
        {"structured_outputs": compact},
        {"guided_json": json.dumps(_CLOSED)},
        {"response_format": described},
    ):
        text = generated(http, **constraint, max_new_tokens=60, logit_bias={**tidy, "1": 0, "90": 0, "92": 0, "25": 0})
        assert json.loads(text)["city"] in ("Paris", "London")


def test_chats_constrain_the_output_in_streams_and_several_choices(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "temperature": 1.5, "seed": 4}
    asked = {**chat, "structured_outputs": {"regex": "[a-c]{4}"}}
    whole = http.post("/v1/chat/completions", json={**asked, "n": 3}).json()
    assert [bool(re.fullmatch("[a-c]{4}", choice["message"]["content"])) for choice in whole["choices"]] == [True] * 3
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"stop"}
    lines = http.post("/v1/chat/completions", json={**asked, "stream": True}).text.split("\n\n")
    pieces = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    text = "".join(piece["delta"].get("content") or "" for piece in pieces)
    assert text == whole["choices"][0]["message"]["content"]
    hostile = {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array", "minItems": 10**5}}}
    }
    for wrong, said in ((hostile, "minItems: 100000"), ({"guided_regex": "("}, "the regular expression")):
        refused = http.post("/v1/chat/completions", json={**chat, **wrong})
        assert (refused.status_code, said in refused.json()["error"]["message"]) == (400, True), refused.text


def test_a_prompt_that_is_far_too_long_is_refused_and_harms_nobody(http: httpx.Client) -> None:
    words = "word " * 2_000_000
    with http.stream("POST", "/invocations", json={"inputs": "a", "parameters": LONG, "stream": True}) as neighbour:
        pieces = neighbour.iter_lines()
        next(pieces)
        for path, body in (
            ("/invocations", {"inputs": words}),
            ("/v1/completions", {"prompt": ["a", words]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": words[:50_000]}] * 100}),
        ):
            answer = http.post(path, json={"model": "model", **body})
            assert answer.status_code == (424 if path == "/invocations" else 400)
            assert "maximum context length is" in answer.text
            assert "characters, which are at least" in answer.text
        answer = http.post("/v1/completions", json={"model": "model", "prompt": [5] * 1_000_000})
        assert answer.status_code == 400
        assert "the prompt has 1000000 tokens" in answer.text

        # What is tokenized whole is not refused, and the worker goes on meanwhile.
        answer = http.post("/tokenize", json={"model": "model", "prompt": words[:500_000], "add_special_tokens": False})
        assert answer.json()["count"] == 500_000
        assert '"generated_text"' in list(pieces)[-1], "the worker has served it to its end"
