"""Makes the arguments of TensorRT-LLM's LLM class from the options, as plain values for `explain` and the engine.

The names are those of TensorRT-LLM 1.x. An argument whose default is the same in LMI and in TensorRT-LLM is there only
if a user sets its option, so that an engine without it still loads all other models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from handlers.tensorrt_llm import engine_fields
from lmi_server.configuration.options import LONG_DTYPES

if TYPE_CHECKING:
    from handlers.tensorrt_llm.options import TensorRtLlmOptions

CONFIG_JSON = "config.json"
"""The entry with the changes to the model's config.json."""

# What is passed on under the option's own name if it is set.
_SAME_NAMES = (
    *("revision", "tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "trust_remote_code"),
    *("context_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size", "enable_attention_dp"),
    *("load_format", "enable_chunked_prefill", "guided_decoding_backend"),
    *("iter_stats_max_iterations", "request_stats_max_iterations", "gather_generation_logits"),
)
_SAME_NAMES_TENSORRT = ("embedding_parallel_mode", "fast_build", "batching_type", "normalize_log_probs")
_SAME_NAMES_KV_CACHE = (
    *("max_tokens", "sink_token_length", "host_cache_size", "onboard_blocks", "cross_kv_cache_fraction"),
    *("secondary_offload_min_priority", "event_buffer_max_size"),
)
_SAME_NAMES_QUANT = ("kv_cache_quant_algo", "group_size", "use_meta_recipe", "has_zero_point")
# SmoothQuant by (per channel, per token).
_SMOOTHQUANT = {
    (False, False): "W8A8_SQ_PER_TENSOR_PLUGIN",
    (False, True): "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN",
    (True, False): "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN",
    (True, True): "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
}
# TensorRT-LLM's names of the linear layers of a decoder. An engine of TensorRT needs a list; without one, PyTorch
# reserves memory for every kind of layer that TensorRT-LLM knows.
_LINEAR_LAYERS = ("attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate")
KV_CACHE_ALGORITHMS = {"fp8": "FP8", "int8": "INT8"}
"""The quantisations of the KV cache of an engine, by option.kv_cache_dtype."""
ON_PYTORCH = {"FP8": "fp8", "NVFP4": "nvfp4"}
"""The data types of a KV cache on PyTorch, by option.kv_cache_quant_algo."""


def build(options: TensorRtLlmOptions) -> Mapping[str, Any]:
    """Return the arguments for the backend of `options`, with the undeclared ones of serving.properties."""
    arguments = {
        "model": options.trtllm_checkpoint_path or options.model_id,
        "tensor_parallel_size": _devices(options.tensor_parallel_degree),
        "pipeline_parallel_size": options.pipeline_parallel_degree,
        "dtype": LONG_DTYPES.get(options.dtype, options.dtype),
        **_given_values(options, _SAME_NAMES),
        "kv_cache_config": _kv_cache(options),
        "scheduler_config": {"capacity_scheduler_policy": options.batch_scheduler_policy.upper()},
        **_lora(options),
        **(_pytorch(options) if options.runs_on == "pytorch" else _tensorrt(options)),
        CONFIG_JSON: _config_changes(options),
    }
    kept = {name: value for name, value in arguments.items() if value is not None and value != {}}
    return _merge(kept, engine_fields.values(options.undeclared_values(engine_fields.passed_on())))


def _devices(degree: int | str) -> int:
    return degree if isinstance(degree, int) and degree > 0 else 1


def _given_values(options: TensorRtLlmOptions, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of the `names` that are set."""
    return {name: getattr(options, name) for name in names if name in options.model_fields_set}


def _merge(arguments: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return `arguments` with `others`; mappings in both are merged, and the value of `others` wins."""
    merged = {**arguments, **others}
    for name in arguments.keys() & others.keys():
        if isinstance(arguments[name], Mapping) and isinstance(others[name], Mapping):
            merged[name] = _merge(arguments[name], others[name])
    return merged


def _kv_cache(options: TensorRtLlmOptions) -> Mapping[str, Any]:
    windows = options.max_attention_window
    sizes = {
        "free_gpu_memory_fraction": options.kv_cache_free_gpu_mem_fraction,
        "enable_block_reuse": options.enable_kv_cache_reuse,
        **_given_values(options, _SAME_NAMES_KV_CACHE),
        **({"max_attention_window": _numbers(windows, int)} if windows is not None else {}),
    }
    if options.runs_on == "tensorrt":  # the engine is built for the size and the type of the blocks
        return sizes
    dtype = options.kv_cache_dtype or ON_PYTORCH.get((options.kv_cache_quant_algo or "").upper())
    named = {} if dtype is None else {"dtype": dtype}
    return {**sizes, "tokens_per_block": options.tokens_per_block, **named}


def _lora(options: TensorRtLlmOptions) -> Mapping[str, Any]:
    if not options.enable_lora:
        return {}
    limits = {"max_loras": options.max_loras, "max_cpu_loras": options.max_cpu_loras}
    config = {
        "max_lora_rank": options.max_lora_rank,
        **{name: limit for name, limit in limits.items() if limit is not None},
        "lora_target_modules": list(options.lora_target_modules or _LINEAR_LAYERS),
    }
    return {"enable_lora": True, "lora_config": config}


def _sizes(options: TensorRtLlmOptions) -> dict[str, Any]:
    return {
        "max_input_len": options.max_input_len,
        "max_seq_len": options.context_length(),
        "max_batch_size": options.max_running(),
        "max_num_tokens": options.max_num_tokens,
        "max_beam_width": options.max_beam_width,
    }


def _tensorrt(options: TensorRtLlmOptions) -> Mapping[str, Any]:
    quantization = _quantization(options)
    knobs = engine_fields.values({"knobs": options.extended_runtime_perf_knob_config or "{}"})["knobs"]
    if "multi_block_mode" in options.model_fields_set:
        knobs = {"multi_block_mode": options.multi_block_mode, **knobs}
    return {
        "build_config": _build(options),
        "quant_config": quantization,
        "calib_config": _calibration(options) if "quant_algo" in quantization else {},
        "enable_build_cache": options.enable_build_cache,
        "extended_runtime_perf_knob_config": knobs,
        **_given_values(options, _SAME_NAMES_TENSORRT),
    }


def _build(options: TensorRtLlmOptions) -> Mapping[str, Any]:
    plugins = {
        "tokens_per_block": options.tokens_per_block,
        # Without it the engine cannot attend to blocks of another request.
        **({"use_paged_context_fmha": True} if options.enable_kv_cache_reuse else {}),
        **_given_values(options, ("use_fused_mlp", "use_fp8_context_fmha")),
    }
    lora = {name: value for name, value in _lora(options).items() if name == "lora_config"}
    return {**_sizes(options), **_given_values(options, ("max_draft_len",)), **lora, "plugin_config": plugins}


def _quantization(options: TensorRtLlmOptions) -> Mapping[str, Any]:
    named: Mapping[str | None, str] = {
        "smoothquant": _SMOOTHQUANT[options.smoothquant_per_channel, options.smoothquant_per_token],
        "awq": "W4A16_AWQ",  # LMI's int4_awq
        "fp8": "FP8",
    }
    smoothing, blocks = options.smoothquant_val, options.awq_block_size
    values = {
        "quant_algo": options.quant_algo or named.get(options.quantize),
        "kv_cache_quant_algo": KV_CACHE_ALGORITHMS.get(options.kv_cache_dtype or ""),
        "smoothquant_val": options.smoothquant_alpha
        if smoothing is None and options.quantize == "smoothquant"
        else smoothing,
        **({"group_size": blocks} if options.quantize == "awq" else {}),
        **({"clamp_val": _numbers(options.clamp_val, float)} if options.clamp_val is not None else {}),
        **({"exclude_modules": _names(options.exclude_modules)} if options.exclude_modules is not None else {}),
        **({"pre_quant_scale": True} if options.pre_quant_scales else {}),
        **_given_values(options, _SAME_NAMES_QUANT),
    }
    return {name: value for name, value in values.items() if value is not None}


def _calibration(options: TensorRtLlmOptions) -> Mapping[str, Any]:
    given = options.model_fields_set
    samples = options.awq_calib_size if options.quantize == "awq" and "calib_size" not in given else options.calib_size
    batches = options.calib_batches if "calib_batches" in given else math.ceil(samples / options.calib_batch_size)
    return {
        "calib_batches": batches,
        "calib_batch_size": min(samples, options.calib_batch_size),
        **_given_values(
            options, ("device", "calib_dataset", "calib_max_seq_length", "random_seed", "tokenizer_max_seq_length")
        ),
    }


def _pytorch(options: TensorRtLlmOptions) -> Mapping[str, Any]:
    given = options.model_fields_set
    arguments = {**_sizes(options), "enable_iter_perf_stats": True, **_given_values(options, ("attn_backend",))}
    if given & {"enable_trt_overlap", "enable_overlap_scheduler"}:
        arguments["disable_overlap_scheduler"] = not (options.enable_trt_overlap or options.enable_overlap_scheduler)
    if "use_custom_all_reduce" in given:
        arguments["allreduce_strategy"] = "AUTO" if options.use_custom_all_reduce else "NCCL"
    if options.use_cuda_graph:
        arguments["cuda_graph_config"] = {"max_batch_size": options.max_running(), "enable_padding": True}
    if "moe_backend" in given:
        arguments["moe_config"] = {"backend": options.moe_backend}
    return arguments


def _config_changes(options: TensorRtLlmOptions) -> Mapping[str, Any]:
    """Return what changes in the model's config.json, by Hugging Face's names."""
    changes: dict[str, Any] = {}
    if "rotary_base" in options.model_fields_set:
        changes["rope_theta"] = options.rotary_base
    if "rotary_dim" in options.model_fields_set:
        changes["rotary_dim"] = options.rotary_dim
    if options.rotary_scaling_type is not None:
        kind = options.rotary_scaling_type
        # Older code reads "type", newer code "rope_type".
        changes["rope_scaling"] = {"type": kind, "rope_type": kind, "factor": options.rotary_scaling_factor}
    return changes


def _numbers(text: str, kind: type[int] | type[float]) -> list[int] | list[float]:
    return [kind(part) for part in text.strip("[] ").split(",")]


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
