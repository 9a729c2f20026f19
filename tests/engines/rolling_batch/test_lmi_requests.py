"""LMI's requests to the rolling batch over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from lmi_cases import check_refused_parameters, check_sampling_parameters, refusal
from product_helpers import serving
from vllm_helpers import make_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model = make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")
    options = {"rolling_batch": "scheduler", "max_rolling_batch_size": "8", "kv_cache_memory_gb": "0.1"}
    with serving(tmp_path_factory.mktemp("served"), model, **options) as server:
        yield server.http


def test_sampling_parameters_change_the_text(http: httpx.Client) -> None:
    check_sampling_parameters(http)


def test_what_is_not_applied_is_refused(http: httpx.Client) -> None:
    check_refused_parameters(http)
    assert "parameters.guided_regex is not supported" in refusal(http, guided_regex="a+")
    assert "parameters.repetition_detection is not supported" in refusal(http, repetition_detection={"a": 1})
