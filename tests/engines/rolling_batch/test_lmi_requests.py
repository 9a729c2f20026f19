"""LMI's requests to the rolling batch over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import lmi_cases
import pytest
from lmi_cases import refusal
from product_helpers import serving
from vllm_helpers import make_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model = make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")
    options = {"rolling_batch": "scheduler", "max_rolling_batch_size": "8", "kv_cache_memory_gb": "0.1"}
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
