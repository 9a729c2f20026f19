"""Clients of other projects, as they are, against the server."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_servers import ForkedPython
from paths import MODEL_CODE, ROOT
from process_log import LIMIT_S
from server_helpers import Server, running

pytestmark = pytest.mark.slow

BENCH = MODEL_CODE / "vllm_bench.py"
REQUESTS, TOKENS = 12, 8


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm_helpers import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve one model under vLLM and under this project's scheduler, by these names."""
    home = tmp_path_factory.mktemp("served")
    # With enforce_eager nothing is compiled beside the test.
    for engine, own in {"vllm": "enforce_eager=true", "scheduler": "tgi_compat=true"}.items():
        keys = [f"model_id={tiny_model}", f"rolling_batch={engine}", "dtype=fp32", "kv_cache_memory_gb=0.1", own]
        (home / engine).mkdir()
        (home / engine / "serving.properties").write_text("\n".join(f"option.{key}" for key in keys))
    with running("--model-store", home, libraries="vllm", workers=len(list(home.iterdir()))) as server:
        yield server


BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
RUNS = [(engine, backend) for engine in ("vllm", "scheduler") for backend in BACKENDS]


def arguments(engine: str, backend: str, server: Server, tiny_model: Path, results: Path) -> list[str]:
    """Return the arguments of a run that writes its results to `results`, in a file named after it."""
    options = {
        "backend": backend,
        "endpoint": BACKENDS[backend],
        "base-url": f"http://127.0.0.1:{server.port}",
        "model": engine,
        "tokenizer": str(tiny_model),
        "dataset-name": "random",
        "random-input-len": "16",
        "random-output-len": str(TOKENS),
        "num-prompts": str(REQUESTS),
        "max-concurrency": "4",
        "result-dir": str(results),
        "result-filename": f"{engine}-{backend}.json",
    }
    return [
        "--save-result",
        "--ignore-eos",
        *(word for name, value in options.items() for word in (f"--{name}", value)),
    ]


def documented(server: Server, tiny_model: Path, results: Path) -> list[str]:
    """Return the arguments of docs/clients.md, for this server and few requests."""
    page = (ROOT / "docs" / "clients.md").read_text()
    command = page[page.index(f".venv/bin/python {BENCH.relative_to(ROOT)}") :].partition("\n\n")[0]
    words = shlex.split(command.replace("\\\n", " "))[2:]
    given = {
        **dict(zip(words[::2], words[1::2], strict=True)),
        "--base-url": f"http://127.0.0.1:{server.port}",
        "--model": "scheduler",
        "--tokenizer": str(tiny_model),
        "--num-prompts": str(REQUESTS),
        "--result-dir": str(results),
        "--result-filename": "documented.json",
    }
    return ["--save-result", *(word for pair in given.items() for word in pair)]


def test_vllm_bench_serve(server: Server, tiny_model: Path, tmp_path: Path) -> None:
    asked = [*(arguments(*run, server, tiny_model, tmp_path) for run in RUNS), documented(server, tiny_model, tmp_path)]
    bench = ForkedPython([str(BENCH)], os.environ | {"HF_HUB_OFFLINE": "1"}, "vllm")
    with bench.stdin, bench.stdout:
        bench.stdin.write("\n".join(map(json.dumps, asked)))
        bench.stdin.close()
        printed = bench.stdout.read()
    assert bench.wait(LIMIT_S) == 0, printed
    assert json.loads((tmp_path / "documented.json").read_text())["completed"] == REQUESTS
    for engine, backend in RUNS:
        result = json.loads((tmp_path / f"{engine}-{backend}.json").read_text())
        assert (result["completed"], result["failed"]) == (REQUESTS, 0), (engine, backend)
        assert result["total_output_tokens"] == REQUESTS * TOKENS


def test_the_hugging_face_client_generates(server: Server) -> None:
    from huggingface_hub import InferenceClient

    with InferenceClient(base_url=f"http://127.0.0.1:{server.port}/predictions/scheduler") as client:
        output = client.text_generation("The capital of France is", max_new_tokens=8, details=True)
        assert output.details.generated_tokens == 8
        assert output.generated_text
        tokens = list(client.text_generation("The capital of France is", max_new_tokens=8, stream=True))
        assert "".join(tokens) == output.generated_text
