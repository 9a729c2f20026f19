"""Deltas of a request, built from outputs in the form of vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from handlers.vllm.requests.outputs import DeltaBuilder, Vocabulary
from lmi_server.contract.errors import HandlerError, RequestError
from lmi_server.contract.generation import Delta, SamplingParameters, StructuredOutputs

EOS = 0
PROMPT = [7, 8, 9]


@dataclass
class Logprob:
    logprob: float
    rank: int
    decoded_token: str | None


@dataclass
class Completion:
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass
class Output:
    outputs: list[Completion]
    prompt_token_ids: list[int] = field(default_factory=lambda: PROMPT)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None


def builder(prompts: list[str] | None = None, **sampling: Any) -> DeltaBuilder:
    """Return a builder; `prompts` collects the texts of the prompt that it asks for."""
    decoded = [] if prompts is None else prompts

    def prompt_text() -> str:
        decoded.append("the prompt")
        return decoded[-1]

    vocabulary = Vocabulary(lambda ids: "".join(f"<{token_id}>" for token_id in ids), [EOS])
    return DeltaBuilder(SamplingParameters(**sampling), None, prompt_text, vocabulary)


def delta(deltas: DeltaBuilder, completion: Completion, **more: Any) -> Delta:
    built = deltas.build(Output([completion], **more))
    assert isinstance(built, Delta)
    return built


def test_only_the_first_delta_has_the_prompt_and_only_the_last_the_usage() -> None:
    prompts: list[str] = []
    deltas = builder(prompts)
    first = delta(deltas, Completion("a", [1]))
    middle = delta(deltas, Completion("bc", [2, 3]))
    last = delta(deltas, Completion("d", [4], "length"), num_cached_tokens=2)
    assert (first.prompt_text, first.prompt_token_ids) == ("the prompt", tuple(PROMPT))
    assert (middle.prompt_text, middle.prompt_token_ids, middle.finish_reason, middle.usage) == (None, None, None, None)
    assert [token.text for token in middle.tokens] == ["<2>", "<3>"]
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (3, 4, 2)
    assert prompts == ["the prompt"]


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        (Completion("", [1], "length"), "length"),
        (Completion("", [EOS], "stop"), "eos_token"),
        (Completion("", [1], "stop", stop_reason="END"), "stop_sequence"),
        (Completion("", [5], "stop", stop_reason=5), "stop_sequence"),
        (Completion("", [6], "stop", stop_reason=6), "eos_token"),  # the model's own, of generation_config.json
        (Completion("", [1], "repetition"), "stop_sequence"),
    ],
)
def test_the_finish_reason_says_who_stopped_the_request(completion: Completion, reason: str) -> None:
    assert delta(builder(stop=("END",), stop_token_ids=(5,)), completion).finish_reason == reason


def test_a_constraint_that_vllm_cannot_compile_is_an_error_of_the_request() -> None:
    failed = Output([Completion("", [], "error")])
    constraint = StructuredOutputs(kind="regex", value="a")
    refused = builder(structured_outputs=constraint).build(failed)
    assert isinstance(refused, RequestError)
    assert "vLLM cannot compile the regular expression" in str(refused)
    begun = builder(structured_outputs=constraint)
    begun.build(Output([Completion("a", [1])]))
    assert isinstance(begun.build(failed), HandlerError)


def test_a_finish_reason_that_is_no_answer_is_an_error() -> None:
    error = builder().build(Output([Completion("", [], "error")]))
    assert isinstance(error, HandlerError)
    assert "error" in error.message


def test_alternatives_are_the_most_likely_tokens_and_may_lack_the_chosen_one() -> None:
    entry = {4: Logprob(-5.0, 9, "d"), 1: Logprob(-0.2, 1, "a"), 2: Logprob(-2.0, 2, None)}
    (token,) = delta(builder(logprobs=2), Completion("d", [4], logprobs=[entry])).tokens
    assert (token.id, token.text, token.logprob) == (4, "<4>", -5.0)
    assert [(top.id, top.text, top.logprob) for top in token.top] == [(1, "a", -0.2), (2, "", -2.0)]


def test_the_first_token_of_a_prompt_has_no_log_probability() -> None:
    scores = [None, {8: Logprob(-1.0, 1, "e")}, {9: Logprob(-3.0, 4, "f")}]
    first = delta(builder(prompt_logprobs=0), Completion("", []), prompt_logprobs=scores)
    assert first.prompt_tokens is not None
    assert [(token.id, token.logprob) for token in first.prompt_tokens] == [(7, None), (8, -1.0), (9, -3.0)]


def test_the_texts_of_scored_tokens_join_to_the_output() -> None:
    """A character of several tokens belongs to its last one, and what never becomes one to the last token."""
    vocabulary = Vocabulary(lambda ids: bytes(ids).decode(errors="replace"), [])
    prompt, text = list("é".encode()), "a€".encode() + b"\xe2"
    deltas = DeltaBuilder(SamplingParameters(logprobs=0, prompt_logprobs=0), None, str, vocabulary)
    tokens = []
    for at, token in enumerate(text):
        scores = [{token: Logprob(-1.0, 1, "\ufffd")}]
        end = "length" if at == len(text) - 1 else None
        built = deltas.build(Output([Completion("", [token], end, logprobs=scores)], prompt))
        assert isinstance(built, Delta)
        tokens += [*(built.prompt_tokens or ()), *built.tokens]
    assert [token.text for token in tokens] == ["", "é", "a", "", "", "€", "\ufffd"]


def test_special_tokens_are_marked() -> None:
    tokens = delta(builder(), Completion("", [1, EOS])).tokens
    assert [token.special for token in tokens] == [False, True]


def test_the_last_delta_has_what_a_request_elsewhere_is_to_say() -> None:
    deltas = builder()
    transfer = {"remote_engine_id": "a", "remote_block_ids": [[1, 2]]}
    first = delta(deltas, Completion("a", [1]))
    output = Output([Completion("b", [EOS], "stop")])
    output.kv_transfer_params = transfer  # type: ignore[attr-defined]
    last = deltas.build(output)
    assert isinstance(last, Delta)
    assert (first.transfer_params, last.transfer_params) == ({}, {"kv_transfer_params": transfer})
