"""LMI-Dist's int8 and bitsandbytes8: the rolling batch serves them, since the installed vLLM makes no 8 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from product_helpers import serving
from tiny_models import llama_of_whole_blocks, saved_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "MPI", "rolling_batch": "lmi-dist", "quantize": "bitsandbytes8"},
        {"engine": "MPI", "rolling_batch": "scheduler", "quantize": "bitsandbytes8"},  # as the warning says
        {"dtype": "int8"},
    ],
    ids=["lmi-dist", "scheduler", "dtype"],
)
def test_a_model_answers_in_8_bits(options: dict[str, str], tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    saved_model(llama_of_whole_blocks(), weights)
    with serving(tmp_path, weights, libraries="transformers", tensor_parallel_degree="1", **options) as server:
        answer = server.http.post("/invocations", json={"inputs": "a fox", "parameters": {"max_new_tokens": 5}})
        assert (answer.status_code, bool(answer.json()["generated_text"])) == (200, True), answer.text
        loaded = next(line for line in server.lines if "] loaded: " in line)
        assert " quantization=bitsandbytes " in loaded
