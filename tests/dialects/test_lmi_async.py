"""The shape of LMI's asynchronous service, and several sequences in an answer of any shape."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from dialect_helpers import DELTAS, SERVED, TEXT, answer, request

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import Delta, Token, Usage
from lmi_server.dialects import Exchange, ServedModel, parse

ASYNC = ServedModel(name="model", served_names=("lmi", "model"), async_service=True)
SAMPLED = {"do_sample": True, "n": 2}


def asked(served: ServedModel = ASYNC, stream: bool = False, inputs: Any = "Hello", **parameters: Any) -> Exchange:
    return parse(request("invocations", {"inputs": inputs, "parameters": parameters, "stream": stream}), served)


def lines(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.decode().splitlines()]


def ended(text: str, logprob: float, usage: Usage | None = None) -> list[Delta]:
    """Return the deltas of a sequence of one token."""
    return [Delta(text, (Token(7, text, logprob),), "length", usage or Usage(2, 1), prompt_text="Hello")]


# --- the asynchronous service ---


def test_an_answer_of_the_asynchronous_service() -> None:
    assert json.loads(answer(asked(), DELTAS)) == {"generated_text": TEXT}
    body = json.loads(answer(asked(details=True, decoder_input_details=True, seed=5), DELTAS))
    tokens = [
        {"id": 10, "text": " Par", "logprob": -0.5},
        {"id": 12, "text": "\ufffd", "logprob": -0.25},
        {"id": 13, "text": "ís\u2028", "logprob": 0.0},
        {"id": 2, "text": "</s>", "logprob": -0.125},
    ]
    assert body == {
        "generated_text": TEXT,
        "details": {
            "finish_reason": "stop",
            "generated_tokens": 4,
            "seed": 5,
            "prefill": [{"id": 2, "text": "lo", "logprob": -1.5}],
            "tokens": tokens,
        },
    }


def test_a_stream_of_the_asynchronous_service() -> None:
    exchange = asked(stream=True, details=True, return_full_text=True, seed=5)
    assert exchange.content_type == "application/jsonlines"
    sent = lines(answer(exchange, DELTAS))
    assert sent[0] == {
        "index": 0,
        "token": {"id": 10, "text": " Par", "logprob": -0.5},
        "generated_text": None,
        "details": None,
    }
    assert sent[-1]["generated_text"] == "Hello" + TEXT
    assert sent[-1]["details"] == {"finish_reason": "stop", "seed": 5, "generated_tokens": 4, "input_length": 2}
    assert lines(answer(asked(stream=True), DELTAS))[-1]["details"] is None


def test_chats_and_prompts_stream_json_lines_except_on_openais_routes() -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    prompt = {"prompt": "Hi", "stream": True}
    for body in (chat, prompt):
        exchange = parse(request("invocations", body), ASYNC)
        assert exchange.content_type == "application/jsonlines"
        sent = lines(answer(exchange, DELTAS))
        assert all("choices" in line and line["model"] == "lmi" for line in sent)
    for route, body in (("chat/completions", chat), ("completions", prompt)):
        exchange = parse(request(route, {**body, "model": "lmi"}), ASYNC)
        assert exchange.content_type == "text/event-stream"
        assert answer(exchange, DELTAS).endswith(b"data: [DONE]\n\n")


def test_a_prompt_comes_before_inputs_and_messages() -> None:
    body = {"prompt": "p", "inputs": "i", "messages": [{"role": "user", "content": "m"}]}
    assert parse(request("invocations", body), ASYNC).requests[0].prompt == "p"
    assert parse(request("invocations", body), SERVED).requests[0].messages


def test_every_model_is_called_lmi() -> None:
    body = {"model": "lmi", "prompt": "a"}
    assert parse(request("completions", body), SERVED).warnings == ()


# --- several sequences ---


@pytest.mark.parametrize(
    "served", [SERVED, ServedModel(name="model", tgi_compat=True), ASYNC], ids=["lmi", "tgi", "async"]
)
def test_several_sequences_stand_in_the_details(served: ServedModel) -> None:
    exchange = asked(served, **SAMPLED, details=True, seed=3)
    assert [sequence.sampling.seed for sequence in exchange.requests] == [3, 4]
    body = json.loads(answer(exchange, ended("a", -3.0), ended("b", -1.0)))
    body = body[0] if isinstance(body, list) else body
    assert body["generated_text"] == "a"
    (other,) = body["details"]["best_of_sequences"]
    assert other["generated_text"] == "b"
    assert other["generated_tokens"] == 1
    assert other["tokens"][0]["id"] == 7


def test_the_best_of_several_comes_first() -> None:
    texts = ended("a", -3.0), ended("b", -1.0), ended("c", -2.0)
    body = json.loads(answer(asked(SERVED, do_sample=True, best_of=3), *texts))
    assert body["generated_text"] == "b"
    assert [other["generated_text"] for other in body["details"]["best_of_sequences"]] == ["c", "a"]
    only = json.loads(answer(asked(SERVED, do_sample=True, best_of=3, n=1), *texts))
    assert only["generated_text"] == "b"
    assert "best_of_sequences" not in only["details"]


def test_a_stream_of_several_sequences_has_the_best_one_at_the_end() -> None:
    exchange = asked(SERVED, stream=True, do_sample=True, best_of=2)
    assert [exchange.add(0, delta) for delta in ended("a", -3.0)] == [b""]
    assert [exchange.add(1, delta) for delta in ended("b", -1.0)] == [b""]
    (line,) = lines(exchange.last())
    assert line["generated_text"] == "b"
    assert [other["generated_text"] for other in line["details"]["best_of_sequences"]] == ["a"]
    both = asked(ASYNC, stream=True, **SAMPLED)
    assert [line["index"] for line in lines(answer(both, ended("a", -3.0), ended("b", -1.0)))] == [0, 1]


@pytest.mark.parametrize("name", ["n", "best_of", "num_return_sequences"])
def test_several_greedy_sequences_are_refused(name: str) -> None:
    for greedy in ({}, {"do_sample": False, "temperature": 1.0}, {"temperature": 0}):
        with pytest.raises(RequestError, match=rf"parameters.{name}: 2 is not allowed; send do_sample=true"):
            asked(SERVED, **{name: 2}, **greedy)
    with pytest.raises(RequestError, match=r"parameters.best_of: 2 is not allowed; send at least n, which is 3"):
        asked(SERVED, n=3, best_of=2, do_sample=True)
    plain_text = msgspec.structs.replace(SERVED, output_formatter="none")
    with pytest.raises(RequestError, match=r"parameters.n: 2 is not allowed; send 1"):
        asked(plain_text, **{name: 2}, do_sample=True)


# --- prompts ---


@pytest.mark.parametrize(
    ("inputs", "prompt"),
    [(["Hello"], "Hello"), ([5, 6], (5, 6)), ([[5, 6]], (5, 6)), ([5], (5,))],
    ids=["text", "ids", "list of ids", "one id"],
)
@pytest.mark.parametrize("served", [SERVED, ASYNC], ids=["lmi", "async"])
def test_a_list_holds_one_prompt(inputs: Any, prompt: Any, served: ServedModel) -> None:
    exchange = asked(served, inputs=inputs, return_full_text=True)
    assert exchange.requests[0].prompt == prompt
    assert json.loads(answer(exchange, DELTAS))["generated_text"] == "Hello" + TEXT


@pytest.mark.parametrize("inputs", [[], [[]], [""], ["a", 1], [["a"]], [1.5], [-1], [[1], [2]]], ids=str)
def test_a_list_that_is_no_prompt_is_refused(inputs: Any) -> None:
    with pytest.raises(RequestError, match="inputs"):
        asked(SERVED, inputs=inputs)


# --- details ---


@pytest.mark.parametrize("served", [SERVED, ASYNC], ids=["lmi", "async"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_note_says_that_the_context_was_too_short(served: ServedModel, stream: bool) -> None:
    deltas = ended("a", -1.0, Usage(250, 6, room=6))
    body = answer(asked(served, stream=stream, details=True, max_new_tokens=90), deltas)
    note = json.loads(body.splitlines()[-1])["details"]["note"]
    assert note == "max_new_tokens was lowered to 6: the prompt has 250 tokens, and the context holds 256"


def test_prompt_logprobs_fill_the_prefill() -> None:
    exchange = asked(SERVED, details=True, prompt_logprobs=2)
    assert exchange.requests[0].sampling.prompt_logprobs == 2
    assert [token["id"] for token in json.loads(answer(exchange, DELTAS))["details"]["prefill"]] == [1, 2]
    without = asked(SERVED, prompt_logprobs=2)
    assert without.requests[0].sampling.prompt_logprobs is None
    assert without.warnings == ("parameters.prompt_logprobs has no effect without parameters.details",)
