"""The names of the arguments of TensorRT-LLM's LLM class, which serving.properties may give undeclared.

`option.NAME` and `option.trtllm_NAME` both pass the argument NAME on. If the package is installed, its source says
which names there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from handlers.tensorrt_llm import package

PREFIX = "trtllm_"
_NOT_PASSED_ON = ("model", "backend", "mpi_session")  # this server decides them
# The names in versions 1.1 to 1.4 that no option declares.
_KNOWN = (
    "gpus_per_node", "moe_cluster_parallel_size", "enable_lm_head_tp_in_adp", "cp_config",
    "fail_fast_on_attention_window_too_large", "lora_config", "kv_cache_config", "batched_logits_processor",
    "peft_cache_config", "scheduler_config", "cache_transceiver_config", "sparse_attention_config",
    "speculative_config", "num_postprocess_workers", "postprocess_tokenizer_dir", "reasoning_parser",
    "decoding_config", "return_perf_metrics", "orchestrator_type", "enable_tqdm", "workspace", "calib_config",
    "quant_config", "build_config", "enable_prompt_adapter", "max_prompt_adapter_token",
    "garbage_collection_gen0_threshold", "cuda_graph_config", "attention_dp_config", "disable_overlap_scheduler",
    "moe_config", "sampler_type", "enable_iter_perf_stats", "enable_iter_req_stats", "print_iter_log",
    "perf_metrics_max_requests", "batch_wait_timeout_ms", "batch_wait_timeout_iters", "batch_wait_max_tokens_ratio",
    "torch_compile_config", "enable_autotuner", "enable_layerwise_nvtx_marker", "enable_min_latency",
    "stream_interval", "force_dynamic_quantization", "allreduce_strategy", "checkpoint_loader", "checkpoint_format",
    "kv_connector_config", "mm_encoder_only", "ray_worker_extension_cls", "custom_tokenizer", "post_processor_hook",
    "model_kwargs", "pp_partition", "tensor_parallel_size", "pipeline_parallel_size",
)  # fmt: skip


def passed_on() -> frozenset[str]:
    """Return the undeclared names (without "option.") that are passed on, in both spellings."""
    return _passed_on(package.installed())


@cache
def _passed_on(installed: package.Package) -> frozenset[str]:
    names = {*_KNOWN, *installed.argument_names()}.difference(_NOT_PASSED_ON)
    return frozenset({*names, *(f"{PREFIX}{name}" for name in names)})


def values(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments that `texts` stand for. A text in JSON means its value."""
    return {name.removeprefix(PREFIX): _value(text) for name, text in texts.items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text
