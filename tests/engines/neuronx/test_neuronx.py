"""The neuronx handler over the fake of transformers-neuronx: keys, generation, failures, ahead-of-time compilation."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from forked_servers import forked_workers
from neuronx_helpers import (
    FAKE_TRANSFORMERS_NEURONX,
    HeldGraphs,
    deltas,
    ids,
    importable,
    pass_of_the_next,
    started,
)
from relay_helpers import on_loop
from rolling_batch_helpers import generated
from server_helpers import Server, running
from tiny_models import byte_tokenizer, saved_model, tiny_model

from handlers.neuronx.options import NeuronxOptions
from lmi_server.commands.partition import partition
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import ModelLoadError, ModelMemoryError, RequestError
from lmi_server.contract.generation import Delta, GenerationRequest, SamplingParameters
from lmi_server.explain.explanation import explain
from lmi_server.serving.models.model_store import named_source


@pytest.fixture(scope="module", autouse=True)
def fake() -> Iterator[None]:
    with importable(FAKE_TRANSFORMERS_NEURONX, "transformers_neuronx"):
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a small Llama and a small GPT-2."""
    root = tmp_path_factory.mktemp("neuronx")
    for family in ("llama", "gpt2", "qwen2"):
        saved_model(tiny_model(family), root / family)
    return root


def loaded(directory: Path, **given: Any) -> dict[str, Any]:
    """Start and stop a handler; return the calls that the library got, by name."""
    from transformers_neuronx import calls

    calls.clear()

    async def once() -> None:
        async with started(directory, **given):
            pass

    asyncio.run(once())
    return dict(calls)


def neuron_config(arguments: dict[str, Any]) -> dict[str, Any]:
    return vars(arguments["neuron_config"])


BATCHED = {"rolling_batch": "auto", "max_rolling_batch_size": 3}


@pytest.mark.parametrize(
    ("family", "given", "batching"),
    [
        ("llama", {**BATCHED, "context_length_estimate": "16,32"}, "continuous"),
        ("llama", {**BATCHED, "rolling_batch": "scheduler", "rolling_batch_strategy": "naive_rolling_batch"}, "column"),
        ("gpt2", BATCHED, "column"),
        ("llama", {}, "column"),
    ],
)
def test_concurrent_requests_get_the_tokens_of_transformers(
    models: Path, family: str, given: dict[str, Any], batching: str
) -> None:
    """More requests than lines, of any length, and one of them leaves early."""
    prompts = [[7], [1, 2, 3], list(range(20)), list(range(40)), [9, 8], list(range(50, 62))]
    model = tiny_model(family)

    async def run() -> list[list[Delta]]:
        async with started(models / family, **given) as handler:
            leaving = handler.generate(
                GenerationRequest(request_id="gone", prompt=(5, 6), sampling=SamplingParameters(max_new_tokens=50))
            )
            await anext(leaving)
            answers = asyncio.gather(*(deltas(handler, prompt, 12) for prompt in prompts))
            await leaving.aclose()
            assert batching in str(handler._loaded.details["batching"])
            return await answers

    for prompt, answer in zip(prompts, asyncio.run(run()), strict=True):
        assert ids(answer) == generated(model, prompt, 12)
        assert answer[-1].usage is not None
        assert answer[-1].usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize(("family", "expected"), [("llama", 4), ("gpt2", 2)])
def test_a_client_that_leaves_frees_its_place_within_one_step(
    models: Path, monkeypatch: pytest.MonkeyPatch, family: str, expected: int
) -> None:
    """The first of three leaves during pass 1, and the third begins in the step after that.

    GPT-2's graphs compute all sequences in pass 2. With continuous batching the second prompt is pass 2, and the step
    after it has a pass for the running sequence before that of the new prompt.
    """

    async def run() -> int:
        async with started(models / family, rolling_batch="auto", max_rolling_batch_size=2) as handler:
            from transformers_neuronx.modeling_auto import ForSampling

            graphs = HeldGraphs(ForSampling, monkeypatch)
            return await pass_of_the_next(handler, graphs, [[1, 2], [3, 4], [201, 202, 203]])

    assert asyncio.run(run()) == expected


@on_loop
async def test_bad_requests_are_refused_and_others_go_on(models: Path) -> None:
    async with started(models / "llama", **BATCHED) as handler:
        with pytest.raises(RequestError, match="decoder_input_details"):
            await deltas(handler, [1], 2, prompt_logprobs=0)
        with pytest.raises(RequestError, match="64"):
            await deltas(handler, [1] * 60, 10)
        with pytest.raises(RequestError, match="vocabulary"):
            await deltas(handler, [999], 2)
        answer = await deltas(handler, [1, 2], 2, logprobs=2, ignore_eos=True)
        assert all(len(token.top) == 2 for delta in answer for token in delta.tokens)


def test_defaults_are_those_of_lmi(models: Path) -> None:
    arguments = loaded(models / "llama")["from_pretrained"]
    assert {"amp": "f16", "tp_degree": 1, "batch_size": 1, "n_positions": 64}.items() <= arguments.items()
    assert neuron_config(arguments)["continuous_batching"] is None
    assert neuron_config(arguments)["quant"] is None
    assert NeuronxOptions().engine_arguments()["n_positions"] == 128


@pytest.mark.parametrize(
    ("fails", "error", "text"),
    [
        ("device", ModelLoadError, "no Neuron device can be used here: neuron-ls"),
        ("compile", ModelLoadError, "option.neuron_optimize_level=1"),
        ("memory", ModelMemoryError, "raise option.tensor_parallel_degree"),
        ("first step", ModelLoadError, "cannot compute with .*nrt_execute status=1200"),
    ],
)
def test_a_failed_load_names_the_cause_and_the_remedy(
    models: Path, monkeypatch: pytest.MonkeyPatch, fails: str, error: type[Exception], text: str
) -> None:
    monkeypatch.setenv("FAKE_NEURONX_FAILS", fails)
    with pytest.raises(error, match=text):
        loaded(models / "llama")


@pytest.mark.parametrize(
    ("family", "given", "text"),
    [
        ("llama", {"n_positions": "512"}, "more than the model's context of 256 tokens"),
        ("llama", {"load_split_model": True}, "holds no directory pytorch_model.bin"),
        ("gpt2", {**BATCHED, "rolling_batch_strategy": "continuous_batching"}, "use naive_rolling_batch"),
        ("qwen2", {"model_loader": "tnx"}, "has no model of type qwen2.*option.model_loader=optimum"),
        ("qwen2", {}, "needs the Python package optimum-neuron, which cannot be imported.*pip install optimum-neuron"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(models: Path, family: str, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelLoadError, match=text):
        loaded(models / family, **given)


def test_a_missing_package_is_named_with_its_command(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers_neuronx", None)

    async def start() -> None:
        async with started(models / "llama", model_loader="tnx", **BATCHED):
            pass

    with pytest.raises(ModelLoadError, match=r"package transformers-neuronx, .*pip install transformers-neuronx"):
        asyncio.run(start())


@pytest.mark.parametrize("schema", [None, "safetensors"])
def test_a_model_compiled_ahead_of_time_is_loaded_and_not_compiled_again(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: str | None
) -> None:
    target = tmp_path / "compiled model"
    calls = loaded(models / "llama", **BATCHED, save_mp_checkpoint_path=str(target), partition_schema=schema)
    assert ("save_pretrained_split" in calls) is (schema is None)
    assert json.loads((target / "config.json").read_text())["neuron"]["sequence_length"] == 64
    byte_tokenizer().save_pretrained(target)  # `lmi-server partition` copies it
    monkeypatch.setenv("FAKE_NEURONX_FAILS", "compile")
    calls = loaded(target, **BATCHED)
    assert calls["load"] == {"directory": str(target / "compiled")}
    assert calls["from_pretrained"]["path"] == str(target / "checkpoint")
    with pytest.raises(ModelLoadError, match=r"set option\.n_positions=64 in place of 32"):
        loaded(target, **BATCHED, n_positions="32")


def test_a_directory_that_cannot_be_written_is_named(models: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match=r"option\.save_mp_checkpoint_path=.*file cannot be written"):
        loaded(models / "llama", save_mp_checkpoint_path=str(tmp_path / "file"))


def test_graphs_alone_are_compiled_beside_a_model_that_stays_where_it_is(models: Path, tmp_path: Path) -> None:
    graphs = tmp_path / "graphs"
    calls = loaded(
        tmp_path,
        model_id=str(models / "llama"),
        save_mp_checkpoint_path=str(graphs),
        partition_schema="compile_only",
    )
    assert calls["save"] == {"directory": str(graphs)}
    assert calls["to_neuron"]["cwd"] != os.getcwd()
    assert loaded(models / "llama", compiled_graph_path=str(graphs))["load"] == {"directory": str(graphs)}
    with pytest.raises(ModelLoadError, match="compile_only writes no weights"):
        loaded(models / "llama", save_mp_checkpoint_path=str(graphs), partition_schema="compile_only")


@pytest.mark.slow
def test_partition_writes_a_model_that_is_ready_to_be_served(models: Path, tmp_path: Path) -> None:
    """A worker compiles it. What `check` finds is the missing device alone, and the load compiles nothing."""
    origin, target = tmp_path / "origin", tmp_path / "target"
    origin.mkdir()
    (origin / "serving.properties").write_text(
        "option.entryPoint=djl_python.transformers_neuronx\noption.n_positions=64\noption.rolling_batch=auto\n"
        f"option.max_rolling_batch_size=2\noption.model_id={models / 'llama'}\n"
        f"option.env=TEST_PACKAGES={FAKE_TRANSFORMERS_NEURONX}\n"
    )
    with forked_workers("transformers"):
        partition(named_source(str(origin)), target, {})
    assert "model_id" not in (target / "serving.properties").read_text()
    explained = explain(inspect_model(target, {}))
    assert explained.problems == explained.files == ()
    assert any("needs a Neuron device" in line for line in explained.unavailable)
    calls = loaded(target, rolling_batch="auto", max_rolling_batch_size=2)
    assert calls["load"] == {"directory": str(target / "compiled")}


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the small Llama; its Neuron core fails at position 41, and works again in a new process."""
    directory = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(models / "llama", directory)
    fails = "FAKE_NEURONX_FAILS=core"
    (directory / "serving.properties").write_text(
        "option.entryPoint=djl_python.transformers_neuronx\noption.rolling_batch=auto\noption.n_positions=64\n"
        f"option.max_rolling_batch_size=2\noption.env={fails},TEST_PACKAGES={FAKE_TRANSFORMERS_NEURONX}\n"
        "retry_threshold=10\n"
    )
    with running(directory, libraries="transformers", workers=1) as process:
        yield process


@pytest.mark.parametrize("loader", ["tnx", "optimum"])
def test_the_options_decide_which_library_has_to_be_installed(tmp_path: Path, loader: str) -> None:
    (tmp_path / "serving.properties").write_text(
        f"option.entryPoint=djl_python.transformers_neuronx\noption.model_loader={loader}\noption.enable_venv=true"
    )
    found = inspect_model(tmp_path, {})
    needed = {"tnx": ("transformers_neuronx",), "optimum": ("optimum.neuron",)}
    assert found.engine.packages == needed[loader]


def tokens_of(stream: str) -> list[int]:
    """Return the token ids in the answer of a streamed request."""
    lines = (json.loads(line) for line in stream.splitlines() if line)
    return [line["token"]["id"] for line in lines if "token" in line]


@pytest.mark.slow
def test_streams_over_http_are_those_of_transformers(server: Server) -> None:
    """Twice as many concurrent requests as there are lines."""
    prompts = ["a", "bc", "hello there", "x" * 20]
    model = tiny_model("llama")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: server.invoke(prompt, 12, stream=True, timeout=120).text, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        encoded = byte_tokenizer().encode(prompt)
        assert tokens_of(answer) == generated(model, encoded, 12)


@pytest.mark.slow
def test_answers_are_held_to_a_form_over_the_compiled_graphs(server: Server) -> None:
    """The scheduler masks the logits, whatever computes them."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    forms: list[dict[str, Any]] = [{"response_format": form}, {"structured_outputs": {"choice": ["yes", "no"]}}]
    bodies = [{"model": "model", "prompt": "x", "max_tokens": 30, "temperature": 0, **given} for given in forms]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda body: server.http.post("/v1/completions", json=body, timeout=120), bodies))
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
    held, chosen = (answer.json()["choices"][0]["text"] for answer in answers)
    assert json.loads(held) in ("yes", "no")
    assert chosen in ("yes", "no")


@pytest.mark.slow
def test_tools_and_adapters_are_refused_by_name(server: Server, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"model": "model", "messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert "tools is not supported by the handler that serves this model" in answer.text
    answer = server.http.post("/adapters", params={"name": "french", "src": str(tmp_path)})
    merge = "LoRA is not enabled. Compiled graphs take no adapters; merge the adapter into the model instead"
    assert (answer.status_code, answer.json()["message"]) == (400, merge)
    answer = server.http.post("/invocations", json={"inputs": "a", "adapters": "french"}, timeout=120)
    assert answer.status_code >= 400
    assert "french" in answer.text
    assert server.invoke("a", 3, timeout=120).status_code == 200


@pytest.mark.slow
def test_a_dead_core_ends_its_worker_and_the_next_one_serves(server: Server) -> None:
    before = server.worker_pid()
    assert server.invoke("x" * 70, 5).status_code in (400, 413, 422, 424)  # too long: it harms nobody
    failed = server.invoke("a", 60, stream=True, timeout=120)
    assert failed.status_code != 200 or "error" in failed.text  # as some of it had reached the client or not
    server.log_line("the Neuron runtime failed: RuntimeError: nrt_execute status=1202")
    answer = server.invoke("a", 5, timeout=120)
    assert answer.status_code == 200
    assert server.worker_pid() != before
