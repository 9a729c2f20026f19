"""Clients of other projects, as they are, against the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import MODEL_CODE
from product_helpers import Server, serving

pytestmark = pytest.mark.slow

BENCH = MODEL_CODE / "vllm_bench.py"
REQUESTS, TOKENS = 12, 8


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm_helpers import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module", params=["vllm", "scheduler"])
def server(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    settings = {"rolling_batch": request.param, "dtype": "fp32", "kv_cache_memory_gb": "0.1"}
    if request.param == "vllm":
        settings["enforce_eager"] = "true"  # nothing is compiled beside the test
    with serving(tmp_path_factory.mktemp("served"), tiny_model, **settings) as server:
        yield server


BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def arguments(backend: str, server: Server, tiny_model: Path, results: Path) -> list[str]:
    """Return the arguments of a run that writes its results to `results`, in a file named after the backend."""
    options = {
        "backend": backend,
        "endpoint": BACKENDS[backend],
        "base-url": server.url,
        "tokenizer": str(tiny_model),
        "dataset-name": "random",
        "random-input-len": "16",
        "random-output-len": str(TOKENS),
        "num-prompts": str(REQUESTS),
        "max-concurrency": "4",
        "result-dir": str(results),
        "result-filename": f"{backend}.json",
    }
    return [
        "--save-result",
        "--ignore-eos",
        *(word for name, value in options.items() for word in (f"--{name}", value)),
    ]


def test_vllm_bench_serve(server: Server, tiny_model: Path, tmp_path: Path) -> None:
    runs = "\n".join(json.dumps(arguments(backend, server, tiny_model, tmp_path)) for backend in BACKENDS)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(BENCH)]
    ran = subprocess.run(command, input=runs, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for backend in BACKENDS:
        result = json.loads((tmp_path / f"{backend}.json").read_text())
        assert (result["completed"], result["failed"]) == (REQUESTS, 0), backend
        assert result["total_output_tokens"] == REQUESTS * TOKENS
