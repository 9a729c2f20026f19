"""TensorRT-LLM from 1.2 on, which runs models on PyTorch: each key has its meaning there, or says what has it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_directories import write_properties
from paths import DATA
from tensorrt_llm_helpers import FAKE, RECORD, fake_installed, make_model, make_newer, records

from handlers.tensorrt_llm import package
from handlers.tensorrt_llm.handler import TensorRtLlmHandler
from handlers.tensorrt_llm.options import TensorRtLlmOptions
from lmi_server.configuration.resolve import Inspection, inspect_model
from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.generation import GenerationRequest, SamplingParameters
from lmi_server.machine.device_tools import Gpu
from lmi_server.machine.inventory import Machine

MACHINE = Machine(2**38, 2**37, gpus=(Gpu("0"),), engines=frozenset({"tensorrt_llm"}))
OLDER = 'set option.backend=tensorrt after pip install "tensorrt-llm<1.2"'
# Keys, and what the LLM class of version 1.4 gets, by the names of nested arguments joined with dots.
REACHES: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"max_input_len": "77"}, {"max_input_len": 77, "max_seq_len": 77 + 512}),
    ({"max_output_len": "33"}, {"max_seq_len": 1024 + 33}),
    ({"use_custom_all_reduce": "true"}, {"allreduce_strategy": "AUTO"}),
    ({"tokens_per_block": "32"}, {"kv_cache_config.tokens_per_block": 32}),
    ({"batch_scheduler_policy": "max_utilization"}, {"scheduler_config.capacity_scheduler_policy": "MAX_UTILIZATION"}),
    ({"kv_cache_free_gpu_mem_fraction": "0.5"}, {"kv_cache_config.free_gpu_memory_fraction": 0.5}),
    ({"max_num_sequences": "5"}, {"max_batch_size": 5}),
    ({"enable_trt_overlap": "true"}, {"disable_overlap_scheduler": False}),
    ({"enable_kv_cache_reuse": "true"}, {"kv_cache_config.enable_block_reuse": True}),
    ({"rotary_base": "7.0"}, {"config.json.rope_theta": 7.0}),
    ({"rotary_dim": "32"}, {"config.json.rotary_dim": 32}),
    (
        {"rotary_scaling_type": "linear", "rotary_scaling_factor": "2.0"},
        {"config.json.rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
    ),
    ({"kv_cache_quant_algo": "fp8"}, {"kv_cache_config.dtype": "fp8"}),
    ({"enable_lora": "true", "max_lora_rank": "16"}, {"lora_config.max_lora_rank": 16}),
    ({"trtllm_kv_cache_config": '{"disk_cache_size": 5}'}, {"kv_cache_config.disk_cache_size": 5}),
]
# Keys that need an engine of TensorRT, with values; the refusal names the remedy.
REFUSED = {"quantize": "awq"}
# Keys that change nothing on PyTorch, which a warning says.
IDLE = {
    "multi_block_mode": "true",
    "use_fused_mlp": "true",
    "smoothquant_alpha": "0.5",
    "smoothquant_per_token": "true",
    "smoothquant_per_channel": "true",
    "multi_query_mode": "true",
    "awq_format": "int4_awq",
    "awq_calib_size": "8",
    "baichuan_model_version": "v2_7b",
    "chatglm_model_version": "chatglm3_6b",
    "gpt_model_version": "starcoder",
}


@pytest.fixture(scope="module", autouse=True)
def newer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with fake_installed(make_newer(tmp_path_factory.mktemp("newer"))):
        yield


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RECORD, str(tmp_path / "record"))
    return tmp_path / "record"


def inspected(directory: Path, **options: str) -> Inspection:
    return inspect_model(write_properties(directory, rolling_batch="trtllm", **options), {}, machine=MACHINE)


def at(values: Any, path: str) -> Any:
    for name in path.replace("config.json", "config json").split("."):
        values = values.get(name.replace(" ", "."), "missing") if isinstance(values, dict) else "missing"
    return values


def answer(model_dir: Path, options: TensorRtLlmOptions) -> str:
    async def run() -> str:
        handler = TensorRtLlmHandler()
        await handler.start(str(model_dir), options)
        request = GenerationRequest(request_id="1", prompt="abc", sampling=SamplingParameters(max_new_tokens=4))
        try:
            return "".join([delta.text async for delta in handler.generate(request)])
        finally:
            await handler.stop()

    return asyncio.run(run())


def test_the_package_says_what_it_runs_models_on() -> None:
    found = package.installed()
    assert (found.version, found.builds_engines, found.backend) == ("1.4.0", False, "pytorch")
    assert "pp_partition" in found.argument_names()
    older = package.Package(FAKE / "tensorrt_llm")
    assert (older.version, older.builds_engines, older.backend) == ("1.1.0", True, "tensorrt")
    assert package.Package().backend == "pytorch"


@pytest.mark.parametrize(
    ("version", "backend"), [("1.1.0rc5", "tensorrt"), ("1.2.1", "pytorch"), ("0.21.0", "tensorrt"), ("dev", "pytorch")]
)
def test_a_package_with_both_backends_runs_pytorch_from_1_2_on(tmp_path: Path, version: str, backend: str) -> None:
    (tmp_path / "_tensorrt_engine").mkdir()
    (tmp_path / "version.py").write_text(f'# a comment\n__version__ = "{version}"\n')
    assert package.Package(tmp_path).backend == backend


def test_the_keys_reach_their_arguments(tmp_path: Path, record: Path) -> None:
    weights = make_model(tmp_path / "weights")
    for number, (given, expected) in enumerate(REACHES):
        found = inspected(tmp_path / str(number), model_id=str(weights), **given)
        assert (found.problems, found.unavailable) == ((), ()), given
        assert not [line for line in found.warnings if "no effect" in line or "unknown" in line], found.warnings
        options: Any = found.options
        assert answer(tmp_path / str(number), options) == "abca"
        line = records(record, "llm")[-1]
        got = {**line["arguments"], "config.json": line["config"]}
        assert {path: at(got, path) for path in expected} == expected
        assert line["backend"] == "TorchLlmArgs"


def test_what_only_an_engine_has_is_refused_with_the_remedy(tmp_path: Path) -> None:
    found = inspected(tmp_path, model_id="x", **REFUSED, trtllm_checkpoint_path="y")
    assert any(
        "nothing with TensorRT-LLM 1.4.0, which runs models on PyTorch; name a checkpoint that is quantised already in"
        f" option.model_id, or {OLDER}" in line
        for line in found.problems
    ), found.problems
    assert any("trtllm_checkpoint_path" in line and f"remove it, or {OLDER}" in line for line in found.problems)


def test_the_older_backend_is_refused_if_the_package_lacks_it(tmp_path: Path) -> None:
    (line,) = inspected(tmp_path, model_id="x", backend="tensorrt").problems
    assert 'allowed: auto or pytorch with TensorRT-LLM 1.4.0, which builds no engines; or pip install "tensorrt' in line


@pytest.mark.parametrize(("dtype", "problems"), [("fp8", 0), ("auto", 1), ("nvfp4", 1)])
def test_a_kv_cache_has_one_data_type(tmp_path: Path, dtype: str, problems: int) -> None:
    found = inspected(tmp_path, model_id="x", kv_cache_quant_algo="FP8", kv_cache_dtype=dtype).problems
    assert len([line for line in found if "both are the data type of the KV cache" in line]) == problems, found


def test_what_changes_nothing_is_a_warning_by_name(tmp_path: Path) -> None:
    found = inspected(tmp_path, model_id="x", **IDLE)
    assert found.problems == ()
    for key in IDLE:
        assert any(f"option.{key}" in line and "no effect" in line for line in found.warnings), key
    assert any("use_fused_mlp has no effect without option.backend=tensorrt and a version" in w for w in found.warnings)


def test_every_documented_key_is_one_of_the_three() -> None:
    rows = json.loads((DATA / "documented_keys.json").read_text())["tables"]
    keys = {row["key"].removeprefix("option.") for row in rows if row["section"] == "TensorRT-LLM"}
    assert keys - {key for given, _ in REACHES for key in given} - REFUSED.keys() - IDLE.keys() == set()


def test_an_engine_that_was_built_before_names_the_way_out(tmp_path: Path, record: Path) -> None:
    model = make_model(tmp_path / "model")
    engine = model / "tensorrtllm_model_repo" / "1"
    engine.mkdir(parents=True)
    (engine / "rank0.engine").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"is an engine of TensorRT, and TensorRT-LLM 1\.4\.0 runs models on Py"):
        answer(model, TensorRtLlmOptions())
    assert answer(model, TensorRtLlmOptions(backend="pytorch")) == "abca"


def test_an_argument_that_the_version_lost_is_named(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    text = r"TensorRT-LLM 1\.4\.0 has no kv_cache_config\.onboard_blocks; remove option\.onboard_blocks"
    with pytest.raises(ModelLoadError, match=text):
        answer(model, TensorRtLlmOptions(onboard_blocks=False))


def test_the_fake_refuses_what_only_engines_have(tmp_path: Path) -> None:
    from tensorrt_llm import LLM

    with pytest.raises(ValueError, match="LLM got invalid argument: build_config"):
        LLM(str(tmp_path), build_config={})
    shutil.rmtree(tmp_path)


def test_the_package_of_another_environment_is_not_judged_by_this_one(tmp_path: Path) -> None:
    found = inspected(tmp_path, engine_version="1.1.0", use_fused_mlp="true")
    assert found.problems == ()
    assert not [line for line in found.warnings if "use_fused_mlp" in line]
