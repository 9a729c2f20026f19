"""Every key of LMI's section on TensorRT-LLM reaches its argument: `explain` shows it, and the fake records it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from model_directories import write_properties
from paths import DATA
from tensorrt_llm_helpers import RECORD, fake_installed, make_model, records

from handlers.tensorrt_llm.options import TensorRtLlmEngine, TensorRtLlmOptions
from lmi_server.configuration.declaration import NoEffect, Unavailable
from lmi_server.configuration.resolve import Inspection, inspect_model
from lmi_server.explain.explanation import explain
from lmi_server.machine.inventory import Gpu, Machine

MACHINE = Machine(2**38, 2**37, gpus=(Gpu("0"), Gpu("1")), engines=frozenset({"tensorrt_llm"}))
SMOOTH = {"quantize": "smoothquant"}
TORCH = {"backend": "pytorch"}
LORA = {"enable_lora": "true"}
SMOOTHQUANT_ALGORITHMS = {
    ("false", "false"): "W8A8_SQ_PER_TENSOR_PLUGIN",
    ("false", "true"): "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN",
    ("true", "false"): "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
    ("true", "true"): "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
}
# Options, and what the LLM class gets, by the names of nested arguments joined with dots.
CASES: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"max_input_len": "77"}, {"build_config.max_input_len": 77, "build_config.max_seq_len": 77 + 512}),
    ({"max_output_len": "33"}, {"build_config.max_seq_len": 1024 + 33}),
    ({"max_input_len": "77", **TORCH}, {"max_input_len": 77, "max_seq_len": 77 + 512}),
    ({"max_seq_len": "99"}, {"build_config.max_seq_len": 99}),
    ({"use_custom_all_reduce": "true", **TORCH}, {"allreduce_strategy": "AUTO"}),
    ({"use_custom_all_reduce": "false", **TORCH}, {"allreduce_strategy": "NCCL"}),
    ({}, {"build_config.plugin_config.tokens_per_block": 64}),
    ({"tokens_per_block": "32"}, {"build_config.plugin_config.tokens_per_block": 32}),
    ({"tokens_per_block": "128", **TORCH}, {"kv_cache_config.tokens_per_block": 128}),
    ({}, {"scheduler_config.capacity_scheduler_policy": "MAX_UTILIZATION"}),
    (
        {"batch_scheduler_policy": "guaranteed_no_evict"},
        {"scheduler_config.capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
    ),
    ({}, {"kv_cache_config.free_gpu_memory_fraction": 0.95}),
    ({"kv_cache_free_gpu_mem_fraction": "0.5"}, {"kv_cache_config.free_gpu_memory_fraction": 0.5}),
    ({"max_rolling_batch_size": "9"}, {"build_config.max_batch_size": 9}),
    ({"max_num_sequences": "5", "max_rolling_batch_size": "9"}, {"build_config.max_batch_size": 5}),
    ({"max_num_sequences": "5", **TORCH}, {"max_batch_size": 5}),
    ({"enable_trt_overlap": "true", **TORCH}, {"disable_overlap_scheduler": False}),
    ({"enable_trt_overlap": "false", **TORCH}, {"disable_overlap_scheduler": True}),
    (
        {"enable_kv_cache_reuse": "true"},
        {"kv_cache_config.enable_block_reuse": True, "build_config.plugin_config.use_paged_context_fmha": True},
    ),
    ({}, {"kv_cache_config.enable_block_reuse": False}),
    ({"multi_block_mode": "false"}, {"extended_runtime_perf_knob_config.multi_block_mode": False}),
    ({"use_fused_mlp": "true"}, {"build_config.plugin_config.use_fused_mlp": True}),
    ({"rotary_base": "500000.0"}, {"config.json.rope_theta": 500000.0}),
    ({"rotary_dim": "32"}, {"config.json.rotary_dim": 32}),
    (
        {"rotary_scaling_type": "dynamic", "rotary_scaling_factor": "1.5"},
        {"config.json.rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 1.5}},
    ),
    ({**SMOOTH}, {"quant_config.smoothquant_val": 0.8}),
    ({**SMOOTH, "smoothquant_alpha": "0.6"}, {"quant_config.smoothquant_val": 0.6}),
    *(
        (
            {**SMOOTH, "smoothquant_per_channel": channel, "smoothquant_per_token": token},
            {"quant_config.quant_algo": algorithm},
        )
        for (channel, token), algorithm in SMOOTHQUANT_ALGORITHMS.items()
    ),
    (
        {"quantize": "awq", "awq_format": "int4_awq"},
        {"quant_config.quant_algo": "W4A16_AWQ", "quant_config.group_size": 128, "calib_config.calib_batches": 1},
    ),
    (
        {"quantize": "awq", "awq_calib_size": "64", "calib_batch_size": "16"},
        {"calib_config.calib_batches": 4, "calib_config.calib_batch_size": 16},
    ),
    ({"quantize": "fp8", "calib_size": "512"}, {"quant_config.quant_algo": "FP8", "calib_config.calib_batches": 16}),
    # Further keys that LMI reads.
    ({"max_num_tokens": "4096"}, {"build_config.max_num_tokens": 4096}),
    (
        {"max_draft_len": "3", "max_beam_width": "4"},
        {"build_config.max_draft_len": 3, "build_config.max_beam_width": 4},
    ),
    ({"use_fp8_context_fmha": "true"}, {"build_config.plugin_config.use_fp8_context_fmha": True}),
    ({"kv_cache_dtype": "int8"}, {"quant_config.kv_cache_quant_algo": "INT8"}),
    ({"kv_cache_dtype": "fp8", "kv_cache_quant_algo": "FP8"}, {"quant_config.kv_cache_quant_algo": "FP8"}),
    ({"kv_cache_dtype": "fp8", **TORCH}, {"kv_cache_config.dtype": "fp8"}),
    ({"kv_cache_quant_algo": "NVFP4", **TORCH}, {"kv_cache_config.dtype": "nvfp4"}),
    ({"kv_cache_quant_algo": "FP8", "quant_algo": "W8A16"}, {"quant_config.kv_cache_quant_algo": "FP8"}),
    ({"max_attention_window": "[64,128]"}, {"kv_cache_config.max_attention_window": [64, 128]}),
    ({"host_cache_size": "1024", "max_tokens": "9"}, {"kv_cache_config.host_cache_size": 1024}),
    ({"clamp_val": "[-1.5, 1.5]", "quant_algo": "FP8"}, {"quant_config.clamp_val": [-1.5, 1.5]}),
    ({"exclude_modules": "lm_head, head"}, {"quant_config.exclude_modules": ["lm_head", "head"]}),
    ({"pre_quant_scales": "true", "has_zero_point": "true"}, {"quant_config.pre_quant_scale": True}),
    ({"quantize": "fp8", "device": "cpu", "random_seed": "7"}, {"calib_config.device": "cpu"}),
    ({"dtype": "bf16", "trust_remote_code": "true"}, {"dtype": "bfloat16", "trust_remote_code": True}),
    ({"tensor_parallel_degree": "1", "pipeline_parallel_degree": "2"}, {"pipeline_parallel_size": 2}),
    ({"moe_expert_parallel_size": "2", "enable_attention_dp": "true"}, {"moe_expert_parallel_size": 2}),
    ({"guided_decoding_backend": "xgrammar"}, {"guided_decoding_backend": "xgrammar"}),
    ({"enable_chunked_prefill": "true", "load_format": "dummy"}, {"enable_chunked_prefill": True}),
    ({"batching_type": "inflight", "fast_build": "true"}, {"batching_type": "INFLIGHT", "fast_build": True}),
    ({"enable_build_cache": "false"}, {"enable_build_cache": False}),
    (
        {"extended_runtime_perf_knob_config": '{"cuda_graph_mode": true}'},
        {"extended_runtime_perf_knob_config.cuda_graph_mode": True},
    ),
    ({"use_cuda_graph": "true", **TORCH}, {"cuda_graph_config.max_batch_size": 32}),
    ({"moe_backend": "TRTLLM", "attn_backend": "FLASHINFER", **TORCH}, {"moe_config.backend": "TRTLLM"}),
    ({**LORA, "max_lora_rank": "16", "max_loras": "3"}, {"lora_config.max_lora_rank": 16, "enable_lora": True}),
    (
        {**LORA, "lora_target_modules": "attn_q,attn_v"},
        {
            "lora_config.lora_target_modules": ["attn_q", "attn_v"],
            "build_config.lora_config.lora_target_modules": ["attn_q", "attn_v"],
        },
    ),
    ({**LORA, "max_lora_rank": "8"}, {"build_config.lora_config.max_lora_rank": 8}),
    ({"q_format": "int4_awq", "quantize": "awq", "awq_block_size": "64"}, {"quant_config.group_size": 64}),
    (
        {"quant_algo": "FP8", "group_size": "32", "use_meta_recipe": "true", "smoothquant_val": "0.3"},
        {
            "quant_config.group_size": 32,
            "quant_config.use_meta_recipe": True,
            "quant_config.smoothquant_val": 0.3,
        },
    ),
    (
        {
            "quantize": "fp8",
            "calib_batches": "3",
            "calib_dataset": "texts",
            "calib_max_seq_length": "99",
            "tokenizer_max_seq_length": "88",
        },
        {
            "calib_config.calib_batches": 3,
            "calib_config.calib_dataset": "texts",
            "calib_config.calib_max_seq_length": 99,
            "calib_config.tokenizer_max_seq_length": 88,
        },
    ),
    ({"max_batch_size": "7"}, {"build_config.max_batch_size": 7}),
    ({"pipeline_parallel_size": "2", "tensor_parallel_degree": "1"}, {"pipeline_parallel_size": 2}),
    ({"context_parallel_size": "2"}, {"context_parallel_size": 2}),
    ({"moe_tensor_parallel_size": "2"}, {"moe_tensor_parallel_size": 2}),
    ({"enable_overlap_scheduler": "false", **TORCH}, {"disable_overlap_scheduler": True}),
    ({"free_gpu_memory_fraction": "0.25"}, {"kv_cache_config.free_gpu_memory_fraction": 0.25}),
    ({"enable_block_reuse": "true"}, {"kv_cache_config.enable_block_reuse": True}),
    (
        {
            "cross_kv_cache_fraction": "0.5",
            "event_buffer_max_size": "6",
            "onboard_blocks": "false",
            "secondary_offload_min_priority": "5",
            "sink_token_length": "4",
        },
        {
            "kv_cache_config.cross_kv_cache_fraction": 0.5,
            "kv_cache_config.event_buffer_max_size": 6,
            "kv_cache_config.onboard_blocks": False,
            "kv_cache_config.secondary_offload_min_priority": 5,
            "kv_cache_config.sink_token_length": 4,
        },
    ),
    ({"embedding_parallel_mode": "none"}, {"embedding_parallel_mode": "NONE"}),
    ({"gather_generation_logits": "true"}, {"gather_generation_logits": True}),
    ({"iter_stats_max_iterations": "9"}, {"iter_stats_max_iterations": 9}),
    ({"request_stats_max_iterations": "8"}, {"request_stats_max_iterations": 8}),
    ({"normalize_log_probs": "true"}, {"normalize_log_probs": True}),
    ({"skip_tokenizer_init": "true"}, {"skip_tokenizer_init": True}),
    (
        {"tokenizer": "owner/name", "tokenizer_mode": "slow", "tokenizer_revision": "main"},
        {"tokenizer": "owner/name", "tokenizer_mode": "slow", "tokenizer_revision": "main"},
    ),
    # Arguments of the LLM class that no option declares, in both spellings.
    ({"trtllm_kv_cache_config": '{"use_uvm": true}'}, {"kv_cache_config.use_uvm": True}),
    ({"stream_interval": "4", **TORCH}, {"stream_interval": 4}),
    ({"trtllm_stream_interval": "4", **TORCH}, {"stream_interval": 4}),
    ({"trtllm_build_config": '{"gather_context_logits": true}'}, {"build_config.gather_context_logits": True}),
]


@pytest.fixture(scope="module", autouse=True)
def fake() -> Iterator[None]:
    with fake_installed():
        yield


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("weights") / "llama")


def inspected(directory: Path, machine: Machine = MACHINE, **options: str) -> Inspection:
    return inspect_model(write_properties(directory, rolling_batch="trtllm", **options), {}, machine=machine)


def at(values: Mapping[str, Any], path: str) -> Any:
    """Return the value of a nested argument; "missing" if there is none."""
    found: Any = values
    for name in path.replace("config.json", "config json").split("."):
        found = found.get(name.replace(" ", "."), "missing") if isinstance(found, Mapping) else "missing"
    return found


def recorded(found: Inspection, record: Path) -> dict[str, Any]:
    """Make the LLM, and return what it got in the form of `engine_arguments`."""
    from handlers.tensorrt_llm import checkpoint, library

    options: Any = found.options
    place = checkpoint.find(found.model_dir, options)
    library.make_llm(options.runs_on, place.arguments).shutdown()
    place.close()
    line = records(record, "llm")[-1]
    assert line["backend"] == ("TorchLlmArgs" if options.runs_on == "pytorch" else "TrtLlmArgs")
    build = {**line["arguments"].get("build_config", {}), "plugin_config": line["plugins"]}
    return {**line["arguments"], "build_config": build, "config.json": line["config"]}


def test_the_keys_reach_their_arguments(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "record"
    monkeypatch.setenv(RECORD, str(record))
    wrong = []
    for number, (options, expected) in enumerate(CASES):
        found = inspected(tmp_path / str(number), model_id=str(weights), **options)
        assert (found.problems, found.unavailable) == ((), ()), options
        assert not [line for line in found.warnings if "unknown" in line or "no effect" in line], found.warnings
        explained, got = explain(found).engine_arguments, recorded(found, record)
        for path, value in expected.items():
            if (at(explained, path), at(got, path)) != (value, value):
                wrong.append(
                    f"{options}: {path} is {at(got, path)!r}, explained {at(explained, path)!r}, not {value!r}"
                )
    assert wrong == []


def test_every_key_is_a_case_or_says_by_name_that_it_has_no_effect() -> None:
    documented = json.loads((DATA / "documented_keys.json").read_text())
    rows = [row for row in documented["tables"] if row["section"] == "TensorRT-LLM"]
    keys = {*(row["key"].removeprefix("option.") for row in rows), *documented["further options"]["tensorrt_llm"]}
    assert len(keys) > 90
    marked = {
        option.key.removeprefix("option.")
        for option in TensorRtLlmOptions.declared_options()
        if any(isinstance(mark, NoEffect | Unavailable) for mark in option.marks)
    }
    tested = {name for options, _ in CASES for name in options}
    # The LLM class has no argument for these: it reads the first four from the model's config.json.
    assert keys & marked == {
        *("baichuan_model_version", "chatglm_model_version", "gpt_model_version", "multi_query_mode"),
        *("num_checkpoint_workers", "num_engine_workers", "load_by_shard", "logits_dtype"),
        *("auto_parallel", "auto_parallel_world_size"),
    }
    places = {"trtllm_checkpoint_path", "save_mp_checkpoint_path"}  # tests of their own have them
    assert keys - marked - places <= tested


def test_every_argument_of_the_llm_class_is_an_option() -> None:
    """It is declared, and then one of the cases, or passed on by its own name; this server decides the others."""
    listed = json.loads((DATA / "tensorrt_llm_signatures.json").read_text())
    names = {name for cls in ("LLM.__init__", "BaseLlmArgs", "TrtLlmArgs", "TorchLlmArgs") for name in listed[cls]}
    assert len(names) > 80
    tested = {name for options, _ in CASES for name in options}
    assert names - TensorRtLlmEngine.argument_names() - tested == {"model", "mpi_session"}


def test_a_converted_checkpoint_is_loaded_in_the_place_of_the_model(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECORD, str(tmp_path / "record"))
    found = inspected(tmp_path / "model", model_id="owner/name", trtllm_checkpoint_path=str(weights))
    assert explain(found).engine_arguments["model"] == str(weights)
    assert recorded(found, tmp_path / "record")["model"] == str(weights)


def test_a_changed_config_leaves_the_model_alone(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record"
    monkeypatch.setenv(RECORD, str(record))
    before = (weights / "config.json").read_text()
    got = recorded(inspected(tmp_path / "model", model_id=str(weights), rotary_base="7.0"), record)
    assert got["config.json"]["rope_theta"] == 7.0
    assert got["config.json"]["architectures"] == ["LlamaForCausalLM"]
    assert (weights / "config.json").read_text() == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quantize": "awq", **TORCH}, "name a checkpoint that is quantised already in option.model_id"),
        ({"trtllm_checkpoint_path": "x", **TORCH}, "remove it, or set option.backend=tensorrt"),
        ({"kv_cache_quant_algo": "INT8", **TORCH}, "allowed: FP8 or NVFP4 with option.backend=pytorch"),
        ({"kv_cache_dtype": "fp4"}, 'option.kv_cache_dtype = "fp4" is not allowed; allowed: auto, fp8 or int8'),
        ({"kv_cache_dtype": "fp8", "kv_cache_quant_algo": "INT8"}, "one of the two with option.backend=tensorrt"),
        ({"kv_cache_dtype": "auto", "kv_cache_quant_algo": "FP8"}, "one of the two with option.backend=tensorrt"),
        ({"max_num_sequences": "4", "max_batch_size": "5"}, "both are the batch size of the engine"),
        ({"rotary_scaling_factor": "2.0"}, "rotary_scaling_type and rotary_scaling_factor only together"),
        ({"backend": "onnx"}, 'option.backend = "onnx" is not allowed'),
        ({"clamp_val": "1"}, "two numbers separated by a comma"),
        ({"guided_decoding_backend": "outlines"}, "xgrammar, llguidance"),
    ],
)
def test_what_the_engine_cannot_have_is_refused_by_name(tmp_path: Path, options: dict[str, str], text: str) -> None:
    found = inspected(tmp_path, model_id="x", **options)
    assert any(text in line for line in found.problems), found.problems


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rolling_batch": "disable", "entryPoint": "tensorrt_llm"}, "no encoder-decoder models such as T5"),
        ({"auto_parallel": "true"}, "use option.tensor_parallel_degree"),
        ({"logits_dtype": "fp16"}, "use fp32"),
    ],
)
def test_what_the_llm_api_lacks_is_refused_by_name(tmp_path: Path, options: dict[str, str], text: str) -> None:
    properties = write_properties(tmp_path, **{"rolling_batch": "trtllm", **options})
    found = inspect_model(properties, {}, machine=MACHINE)
    assert any(text in line for line in found.unavailable), found.unavailable


@pytest.mark.parametrize(
    ("options", "key", "text"),
    [
        ({"use_custom_all_reduce": "true"}, "use_custom_all_reduce", "has no effect without option.backend=pytorch"),
        ({"enable_trt_overlap": "true"}, "enable_trt_overlap", "has no effect without option.backend=pytorch"),
        ({"use_fused_mlp": "true", **TORCH}, "use_fused_mlp", "has no effect without option.backend=tensorrt"),
        ({"awq_calib_size": "8"}, "awq_calib_size", "has no effect without option.quantize=awq"),
        ({"smoothquant_alpha": "0.5"}, "smoothquant_alpha", "has no effect without option.quantize=smoothquant"),
        ({"max_loras": "2"}, "max_loras", "has no effect without option.enable_lora=true"),
        ({"gpt_model_version": "starcoder"}, "gpt_model_version", "TensorRT-LLM finds it in the model's config.json"),
        ({"trtllm_strem_interval": "2"}, "trtllm_strem_interval", "did you mean option.trtllm_stream_interval?"),
    ],
)
def test_what_has_no_effect_is_a_warning_by_name(tmp_path: Path, options: dict[str, str], key: str, text: str) -> None:
    found = inspected(tmp_path, model_id="x", **options)
    assert found.problems == ()
    assert any(f"option.{key}" in line and text in line for line in found.warnings), found.warnings


@pytest.mark.parametrize("engine", ["MPI", "Python"])
@pytest.mark.parametrize("rolling_batch", ["trtllm", "auto"])
def test_both_engines_mean_the_same(tmp_path: Path, engine: str, rolling_batch: str) -> None:
    """`auto` chooses it if it is the only engine with a scheduler of its own that is installed."""
    options = {"rolling_batch": rolling_batch, "model_id": "x"}
    found = inspect_model(write_properties(tmp_path, engine=engine, **options), {}, machine=MACHINE)
    assert (found.spec.title, found.problems, found.options.ranks) == ("tensorrt_llm", (), None)
    explanation = explain(found)
    assert (explanation.can_be_served, explanation.division) == (True, "TensorRT-LLM starts a rank for each of 2 GPUs")
    assert explanation.engine_arguments["tensor_parallel_size"] == 2
    assert "mpirun" not in explanation.worker_command


def test_what_this_machine_lacks_is_named_with_the_command(tmp_path: Path) -> None:
    bare = Machine(2**34, 2**33)
    found = inspected(tmp_path, machine=bare, model_id="x")
    assert found.problems == ()
    explanation = explain(found)
    assert not explanation.can_be_served
    assert explanation.unavailable == (
        "tensorrt_llm needs the Python package tensorrt_llm, which is not installed; run: "
        'pip install "tensorrt-llm<1.2"',
        "tensorrt_llm needs an NVIDIA GPU, and none is visible; serve the model on a machine with one",
    )
