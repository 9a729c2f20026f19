"""Loading with TensorRT-LLM: just in time, from engines built before, and the ways in which it fails."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from model_directories import write_properties
from paths import SAMPLES
from product_helpers import COMMANDS
from tensorrt_llm_helpers import FAIL, RECORD, fake_installed, make_model, records, variables

from handlers.tensorrt_llm.handler import TensorRtLlmHandler
from handlers.tensorrt_llm.options import TensorRtLlmOptions
from lmi_server.configuration.engine import describe_engine
from lmi_server.configuration.handlers import HANDLERS
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import ModelLoadError, ModelMemoryError, RequestError
from lmi_server.contract.generation import Delta, GenerationRequest, SamplingParameters, StructuredOutputs

_NOTHING: Mapping[str, str] = {}


@pytest.fixture
def fake() -> Iterator[None]:
    with fake_installed():
        yield


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RECORD, str(tmp_path / "record"))
    return tmp_path / "record"


def generated(
    model_dir: Path, sampling: SamplingParameters, passed_through: Mapping[str, str] = _NOTHING, **options: Any
) -> list[Delta]:
    """Load a model in this process, generate, and stop."""

    async def run() -> list[Delta]:
        handler = TensorRtLlmHandler()
        await handler.start(str(model_dir), TensorRtLlmOptions.restore(options, passed_through))
        request = GenerationRequest(request_id="1", prompt="abc", sampling=sampling)
        try:
            return [delta async for delta in handler.generate(request)]
        finally:
            await handler.stop()

    return asyncio.run(run())


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


GREEDY = SamplingParameters(max_new_tokens=4)


# --- what fails ---


def test_without_the_package_the_error_names_it_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"needs NVIDIA's package tensorrt_llm .*: pip install tensorrt-llm"):
        generated(make_model(tmp_path / "model"), GREEDY)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        ("build", ModelLoadError, "TensorRT-LLM cannot load the model: RuntimeError: Engine building failed"),
        ("memory", ModelMemoryError, "out of memory"),
    ],
)
def test_a_load_fails_with_the_message_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str, kind: type[ModelLoadError], text: str
) -> None:
    monkeypatch.setenv(FAIL, failure)
    with pytest.raises(kind, match=text):
        generated(make_model(tmp_path / "model"), GREEDY)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quant_algo": "W1A1"}, "option.quant_algo=W1A1 is not allowed; allowed: W8A16, "),
        ({"skip_tokenizer_init": True}, "remove option.skip_tokenizer_init"),
        ({"model_id": "empty"}, "empty holds no config.json and no built engine"),
        ({"model_id": "owner/name", "rotary_base": 2.0}, "download the model first"),
        ({"save_mp_checkpoint_path": "x", "model_id": "built"}, "is a built engine already"),
    ],
)
def test_options_that_do_not_fit_the_model_are_named(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    model = make_model(tmp_path / "model")
    (model / "empty").mkdir()
    (model / "built").mkdir()
    (model / "built" / "rank0.engine").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=text):
        generated(model, GREEDY, **options)


@pytest.mark.usefixtures("fake")
def test_a_load_that_fails_late_ends_the_ranks_of_the_engine(tmp_path: Path, record: Path) -> None:
    (tmp_path / "file").touch()
    text = r"option\.save_mp_checkpoint_path=.*file cannot be written .*; name another directory"
    with pytest.raises(ModelLoadError, match=text):
        generated(make_model(tmp_path / "model"), GREEDY, save_mp_checkpoint_path=str(tmp_path / "file"))
    assert [line["kind"] for line in records(record)] == ["llm", "shutdown"]


@pytest.mark.usefixtures("fake")
def test_a_version_without_engines_of_tensorrt_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm._tensorrt_engine", None)
    with pytest.raises(ModelLoadError, match=r"has no engines of TensorRT any more .*; remove option.backend"):
        generated(make_model(tmp_path / "model"), GREEDY, backend="tensorrt")


# --- PyTorch ---


@pytest.mark.usefixtures("fake")
def test_pytorch_reports_alternatives_and_the_log_probabilities_of_the_prompt(tmp_path: Path, record: Path) -> None:
    sampling = SamplingParameters(max_new_tokens=2, logprobs=3, prompt_logprobs=0)
    deltas = generated(make_model(tmp_path / "model"), sampling, backend="pytorch")
    (first, second) = [token for delta in deltas for token in delta.tokens]
    assert (first.text, first.logprob, first.rank) == ("a", -0.25, 1)
    assert [top.text for top in first.top][:1] == ["a"]
    assert [len(token.top) for token in (first, second)] == [3, 3]
    assert deltas[0].prompt_tokens is not None
    assert [token.logprob for token in deltas[0].prompt_tokens] == [None, -0.5, -0.5]
    assert records(record, "llm")[0]["backend"] == "TorchLlmArgs"
    assert records(record, "request")[0]["params"]["logprobs"] == 3


@pytest.mark.usefixtures("fake")
def test_a_request_is_refused_if_nothing_enforces_its_schema(tmp_path: Path) -> None:
    sampling = SamplingParameters(structured_outputs=StructuredOutputs(kind="json", value={}))
    with pytest.raises(RequestError, match=r"set option.guided_decoding_backend=xgrammar"):
        generated(make_model(tmp_path / "model"), sampling, backend="pytorch")


@pytest.mark.slow  # imports torch
@pytest.mark.usefixtures("fake")
def test_biases_and_allowed_tokens_are_one_bias_of_the_logits(tmp_path: Path, record: Path) -> None:
    model = make_model(tmp_path / "model")
    letters = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    allowed = SamplingParameters(max_new_tokens=2, allowed_token_ids=(letters["x"], letters["y"]))
    assert set(text_of(generated(model, allowed))) <= {"x", "y"}
    biased = SamplingParameters(max_new_tokens=2, logit_bias={letters["z"]: 50.0})
    assert text_of(generated(model, biased)) == "zz"
    assert records(record, "request")[-1]["params"]["embedding_bias"] == [257]
    with pytest.raises(RequestError, match="token id 9999 is not in the vocabulary of 257 tokens"):
        generated(model, SamplingParameters(logit_bias={9999: 1.0}))


@pytest.mark.usefixtures("fake")
def test_an_abort_has_reached_the_engine_when_the_generator_is_closed(tmp_path: Path, record: Path) -> None:
    async def leave() -> list[dict[str, Any]]:
        handler = TensorRtLlmHandler()
        await handler.start(str(make_model(tmp_path / "model")), TensorRtLlmOptions())
        sampling = SamplingParameters(max_new_tokens=500)
        deltas = handler.generate(GenerationRequest(request_id="1", prompt="abc", sampling=sampling))
        await anext(deltas)
        await deltas.aclose()
        aborted = records(record, "abort")
        await handler.stop()
        return aborted

    assert len(asyncio.run(leave())) == 1


# --- the samples ---


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("tensorrt_llm*.properties")), ids=lambda sample: sample.stem)
def test_a_sample_runs(sample: Path, tmp_path: Path, record: Path) -> None:
    """A small model takes the place of the sample's own, which would have to be downloaded."""
    weights = make_model(tmp_path / "weights")
    (tmp_path / "serving.properties").write_text(sample.read_text(encoding="utf-8"), encoding="utf-8")
    found = inspect_model(tmp_path, {}, {"option.model_id": str(weights)})
    assert (found.problems, found.unavailable, found.warnings) == ((), (), ())
    model = found.resolved()
    given = model.options.dump()
    assert text_of(generated(tmp_path, GREEDY, passed_through=model.options.passed_through, **given)) == "abca"
    stands_in = "TorchLlmArgs" if "pytorch" in sample.stem else "TrtLlmArgs"
    assert records(record, "llm")[-1]["backend"] == stands_in


# --- engines that are built before ---


@pytest.mark.slow
@pytest.mark.usefixtures("fake")
def test_an_engine_is_built_ahead_of_time_and_then_only_loaded(tmp_path: Path, record: Path) -> None:
    weights = make_model(tmp_path / "weights")
    (weights / "model.safetensors").write_bytes(b"weights")
    options = {"model_id": str(weights), "quantize": "awq", "max_input_len": "64", "max_output_len": "32"}
    origin = write_properties(tmp_path / "origin", engine="MPI", rolling_batch="trtllm", **options)
    command = [str(COMMANDS / "lmi-server"), "partition", str(origin), "--save", str(tmp_path / "built")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=variables(tmp_path / "first"), timeout=300
    )
    assert done.returncode == 0, done.stderr
    for line in (
        f"converts {weights}, quantises it (W4A16_AWQ) and builds an engine",
        "Loading Model: [1/2]\tLoading HF model to memory",
        "Loading Model: [2/2]\tBuilding TRT-LLM engine",
        "saved the engine to",
    ):
        assert line in done.stderr
    built = tmp_path / "built"
    assert (built / "tensorrtllm_model_repo" / "rank0.engine").is_file()
    assert not (built / "model.safetensors").exists()
    assert (built / "serving.properties").read_text().splitlines() == [
        "engine=MPI",
        "option.rolling_batch=trtllm",
        "option.tensor_parallel_degree=1",
    ]
    # The engine brings its own lengths.
    assert text_of(generated(built, GREEDY)) == "abca"
    loaded = records(record, "llm")[-1]["arguments"]
    assert loaded["model"] == str(built / "tensorrtllm_model_repo")
    assert not loaded.keys() & {"build_config", "quant_config", "calib_config", "enable_build_cache"}
    with pytest.raises(RequestError, match="maximum context length is 96 tokens"):
        generated(built, SamplingParameters(max_new_tokens=95))


@pytest.mark.usefixtures("fake")
def test_an_engine_in_lmis_repository_finds_the_tokenizer_of_its_model(tmp_path: Path, record: Path) -> None:
    """LMI's layout has the engine some folders below, and no tokenizer beside it."""
    model = make_model(tmp_path / "model")
    engine = model / "tensorrtllm_model_repo" / "tensorrt_llm" / "1"
    engine.mkdir(parents=True)
    (engine / "rank0.engine").write_bytes(b"")
    (engine / "config.json").write_text(json.dumps({"build_config": {"max_seq_len": 50, "max_input_len": 40}}))
    assert text_of(generated(model, GREEDY)) == "abca"
    loaded = records(record, "llm")[-1]["arguments"]
    assert (loaded["model"], loaded["tokenizer"]) == (str(engine), str(model))


@pytest.mark.usefixtures("fake")
def test_a_tokenizer_is_found_in_the_model_directory(tmp_path: Path, record: Path) -> None:
    model = make_model(tmp_path / "model")
    make_model(model / "other")
    (model / "tokenizer.json").unlink()
    assert text_of(generated(model, GREEDY, tokenizer="other")) == "abca"
    assert records(record, "llm")[-1]["arguments"]["tokenizer"] == str(model / "other")


def test_pytorch_has_nothing_to_build_ahead_of_time() -> None:
    engine = describe_engine(HANDLERS.by_title("tensorrt_llm"), TensorRtLlmOptions(backend="pytorch"))
    assert "TensorRT-LLM on PyTorch builds no engine; serve the model as it is" in str(engine.partition({}))


@pytest.mark.usefixtures("fake")
def test_a_long_build_shows_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(import_module("handlers.tensorrt_llm.engine"), "_PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO):
        generated(make_model(tmp_path / "model"), GREEDY)
    assert "TensorRT-LLM still loads the model, for 0 seconds so far" in caplog.text
