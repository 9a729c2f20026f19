"""The tiny model served by this project and by vLLM itself, once for all tests that compare the two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from product_helpers import Server, serving
from vllm_helpers import SETTINGS, make_tiny_model, vllm_server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory where servers of the tiny model store compiled code."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session")
def ours(tiny_model: Path, compiled_code: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_CACHE_ROOT", str(compiled_code))
            server = stack.enter_context(serving(tmp_path_factory.mktemp("ours"), tiny_model, **SETTINGS))
        yield server


@pytest.fixture(scope="session")
def theirs(tiny_model: Path) -> Iterator[httpx.Client]:
    arguments = ("--dtype", "float32", "--max-num-seqs", "32", "--enforce-eager", "--disable-uvicorn-access-log")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with vllm_server(tiny_model, "model", *arguments, *tools) as client:
        yield client
