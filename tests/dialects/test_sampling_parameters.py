"""No parameter of vLLM's SamplingParams or of transformers' generate() is taken and left out without a word."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from dialect_helpers import SERVED, request

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import Feature, SamplingParameters
from lmi_server.dialects import ServedModel, parse
from lmi_server.dialects.lmi import NO_EFFECT, PARAMETERS
from lmi_server.dialects.openai import CHAT_FIELDS, COMPLETION_FIELDS

FEATURES: frozenset[Feature] = frozenset(
    {"structured_outputs", "min_tokens", "bad_words", "allowed_token_ids", "engine_extras"}
)
CAPABLE = ServedModel(name="model", features=FEATURES)


def fields_of_vllm() -> list[str]:
    """Return the public fields of SamplingParams, read from its source: importing vLLM takes seconds."""
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    source = Path(found.submodule_search_locations[0], "sampling_params.py").read_text()
    (declared,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"
    )
    names = [node.target.id for node in declared.body if isinstance(node, ast.AnnAssign) if hasattr(node.target, "id")]
    return [name for name in names if not name.startswith("_")]


def arguments_of_generate() -> list[str]:
    from transformers import GenerationConfig

    names = [*GenerationConfig().to_dict(), "num_beam_groups", "diversity_penalty", "constraints", "force_words_ids"]
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def refusal(name: str, value: Any, served: ServedModel = CAPABLE) -> str | None:
    """Return how an LMI request with this parameter is refused; None if it is taken."""
    try:
        parse(request("invocations", {"inputs": "a", "parameters": {name: value}}), served)
    except RequestError as error:
        return error.message
    return None


def samples(name: str) -> Iterator[Any]:
    """Yield values that mean something to some parameter; a reader takes or refuses each of them by name."""
    yield from (2, 0.5, True, False, "x", ["x"], [3], {"3": 1.0}, {"type": "json_object"}, {"regex": "a"})


def test_every_parameter_changes_the_request_or_is_refused_by_name() -> None:
    for name in dict.fromkeys([*fields_of_vllm(), *arguments_of_generate()]):
        if name not in NO_EFFECT:
            check_parameter(name)


def check_parameter(name: str) -> None:
    assert name in PARAMETERS, f"declare {name}: honoured, refused by name, or in NO_EFFECT with the reason"
    refused = [message for value in samples(name) if (message := refusal(name, value))]
    assert refused, f"{name} takes anything"
    assert all(f"parameters.{name}" in message for message in refused)
    if PARAMETERS[name].target is None:
        assert any("is not supported" in message or "is not allowed" in message for message in refused)


@pytest.mark.parametrize("known", [COMPLETION_FIELDS, CHAT_FIELDS], ids=["completions", "chats"])
def test_requests_of_openai_know_every_field_of_sampling_params(known: dict[str, Any]) -> None:
    assert not set(fields_of_vllm()) - known.keys()


def test_a_static_batch_takes_an_argument_of_generate_or_refuses_it_by_name() -> None:
    pytest.importorskip("torch")
    from handlers.tasks.task import read_parameters
    from handlers.tasks.text_tasks import TextGeneration

    for name in arguments_of_generate():
        if name not in TextGeneration.parameters:
            with pytest.raises(RequestError, match=f"parameters.{name} is not known"):
                read_parameters({name: 1}, TextGeneration.parameters)


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("max_tokens", 7, "max_new_tokens", 7),
        ("min_tokens", 3, "min_tokens", 3),
        ("min_new_tokens", 3, "min_tokens", 3),
        ("bad_words", ["a"], "bad_words", ("a",)),
        ("logit_bias", {"5": -2}, "logit_bias", {5: -2.0}),
        ("allowed_token_ids", [4, 5], "allowed_token_ids", (4, 5)),
        ("stop_strings", "end", "stop", ("end",)),
        ("eos_token_id", 9, "stop_token_ids", (9,)),
        ("eos_token_id", [9, 8], "ignore_eos", True),
        ("repetition_detection", {"a": 1}, "extra", {"repetition_detection": {"a": 1}}),
        ("spaces_between_special_tokens", False, "spaces_between_special_tokens", False),
    ],
)
def test_a_parameter_reaches_the_engine(name: str, value: Any, field: str, expected: Any) -> None:
    exchange = parse(request("invocations", {"inputs": "a", "parameters": {name: value}}), CAPABLE)
    assert exchange.warnings == ()
    assert getattr(exchange.requests[0].sampling, field) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("grammar", {"type": "regex", "value": "a+"}), ("guided_regex", "a+")],
    ids=["grammar", "guided"],
)
def test_a_constraint_reaches_an_engine_that_has_constraints(name: str, value: Any) -> None:
    constraint = (
        parse(request("invocations", {"inputs": "a", "parameters": {name: value}}), CAPABLE)
        .requests[0]
        .sampling.structured_outputs
    )
    assert constraint is not None
    assert (constraint.kind, constraint.value) == ("regex", "a+")
    assert f"parameters.{name} is not supported" in (refusal(name, value, SERVED) or "")


def test_the_own_name_wins_over_an_alias() -> None:
    body = {"inputs": "a", "parameters": {"max_new_tokens": 5, "max_tokens": 9}}
    assert parse(request("invocations", body), SERVED).requests[0].sampling.max_new_tokens == 5


def test_what_changes_nothing_is_taken() -> None:
    neutral = {"no_repeat_ngram_size": 0, "guidance_scale": 1.0, "detokenize": True, "bad_words_ids": [], "n": 1}
    exchange = parse(request("invocations", {"inputs": "a", "parameters": neutral}), SERVED)
    assert exchange.requests[0].sampling == SamplingParameters(fit_context=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words", ["a" * 101]),
        ("bad_words", ["a"] * 1001),
        ("logit_bias", {str(token): 1 for token in range(5001)}),
        ("stop_token_ids", [1.0] * 10_001),
    ],
)
def test_what_costs_time_for_each_entry_is_bounded(name: str, value: Any) -> None:
    refused = refusal(name, value)
    assert refused is not None
    assert refused.startswith(f"parameters.{name}: ")


def test_token_ids_may_be_many() -> None:
    ids = list(range(200_000))
    taken = parse(request("invocations", {"inputs": "a", "parameters": {"allowed_token_ids": ids}}), CAPABLE)
    assert taken.requests[0].sampling.allowed_token_ids == tuple(ids)
    few = {"inputs": "a", "parameters": {"stop_token_ids": [1.0, "2", 3]}}
    assert parse(request("invocations", few), CAPABLE).requests[0].sampling.stop_token_ids == (1, 2, 3)
