"""The tiny model served by this project and by vLLM itself, once for all tests that compare the two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from product_helpers import Server, serving
from vllm_helpers import SETTINGS, Loader, make_tiny_model, vllm_server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def compilation(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the variables with which the tiny model is compiled and its code is found again."""
    return {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("compiled"))}


@pytest.fixture(scope="session")
def ours(tiny_model: Path, compilation: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in compilation.items():
                patch.setenv(name, value)
            server = stack.enter_context(serving(tmp_path_factory.mktemp("ours"), tiny_model, **SETTINGS))
        yield server


@pytest.fixture(scope="session")
def theirs(tiny_model: Path) -> Iterator[httpx.Client]:
    arguments = ("--dtype", "float32", "--max-num-seqs", "32", "--enforce-eager", "--disable-uvicorn-access-log")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    constraints = ("--structured-outputs-config", '{"backend": "guidance"}')
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            # With that library it cannot hold calls in the form of the model's family; a forced call is a list in JSON.
            patch.setenv("VLLM_ENFORCE_STRICT_TOOL_CALLING", "0")
            client = stack.enter_context(vllm_server(tiny_model, "model", *arguments, *tools, *constraints))
        yield client


@pytest.fixture(scope="session")
def loader(compilation: dict[str, str]) -> Iterator[Loader]:
    loader = Loader(compilation)
    yield loader
    loader.close()
