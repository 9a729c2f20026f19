"""No parameter of vLLM's SamplingParams is taken and left out without a word.

tests/engines/generation/test_generate_arguments.py checks those of transformers' generate().
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from dialect_helpers import SERVED, request
from parameter_checks import CAPABLE, check_parameter, refusal

from lmi_server.contract.generation import SamplingParameters
from lmi_server.dialects import parse
from lmi_server.dialects.lmi import NO_EFFECT
from lmi_server.dialects.openai import CHAT_FIELDS, COMPLETION_FIELDS


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


def test_every_parameter_changes_the_request_or_is_refused_by_name() -> None:
    for name in fields_of_vllm():
        if name not in NO_EFFECT:
            check_parameter(name)


@pytest.mark.parametrize("known", [COMPLETION_FIELDS, CHAT_FIELDS], ids=["completions", "chats"])
def test_requests_of_openai_know_every_field_of_sampling_params(known: dict[str, Any]) -> None:
    assert not set(fields_of_vllm()) - known.keys()


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
