"""Options of the demo model on a real GPU: each way to serve it answers, and what cannot be is refused by name.

Skipped on a machine without a GPU by NVIDIA. docs/hardware.md says on which ones it has run.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from gpu_helpers import PROMPTS, capital_of_france, generated
from product_helpers import serving

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: make test-gpu", allow_module_level=True)

LIMIT = "PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction"  # torch fails there as if the GPU had no more
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bf16"},
        {"dtype": "fp16", "enable_cuda_graph": "false"},
        {"dtype": "bf16", "speculative_draft_model": "[ngram]"},
        {"dtype": "bf16", "entryPoint": "djl_python.deepspeed", "rolling_batch": "deepspeed"},
        pytest.param({"dtype": "bf16", "quantize": "bitsandbytes4"}, marks=needs_bitsandbytes),
    ],
    ids=lambda options: " ".join(options.values()),
)
def test_ways_to_serve_it(tmp_path: Path, demo_model_dir: Path, options: dict[str, str]) -> None:
    with serving(tmp_path, demo_model_dir, kv_cache_memory_gb="2", **options) as server:
        assert "Paris" in capital_of_france(server)
        is_recorded = "option.enable_cuda_graph: decoding runs as" in "".join(server.lines)
        assert is_recorded is ("deepspeed" not in options.values() and "enable_cuda_graph" not in options)


@needs_bitsandbytes
def test_eight_bits_warn_once_of_their_casts(tmp_path: Path, demo_model_dir: Path) -> None:
    with serving(tmp_path, demo_model_dir, kv_cache_memory_gb="2", dtype="bf16", quantize="bitsandbytes8") as server:
        assert len(generated(server, PROMPTS)) == len(PROMPTS)
    assert sum("inputs will be cast" in line for line in server.lines) <= 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel_degree": "99"}, "a worker takes 99 GPUs"),
        (
            {"kv_cache_memory_gb": "2000", "max_rolling_batch_size": "100000"},
            "option.kv_cache_memory_gb=2000.0: the KV cache takes",
        ),
        ({"env": f"{LIMIT}:0.002"}, "does not fit into memory"),
        ({"env": f"{LIMIT}:0.02"}, "lower option.kv_cache_memory_gb"),
    ],
    ids=["more GPUs", "a larger KV cache", "no memory for weights", "no memory for the KV cache"],
)
def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path, demo_model_dir: Path, options: dict[str, str], reason: str
) -> None:
    with (
        pytest.raises(AssertionError, match="could not be loaded: ") as caught,
        serving(tmp_path, demo_model_dir, dtype="fp32", **options),
    ):
        pass
    assert reason in str(caught.value)
