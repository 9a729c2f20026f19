"""Loads a transformers model for the rolling batch and decides threads, KV-cache memory and chunk sizes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numba
import torch
from transformers import AutoModelForCausalLM

from handlers.checkpoints.loading import eos_token_ids, load_config, load_model, load_tokenizer, set_threads
from handlers.checkpoints.quantization import quantization_details
from handlers.huggingface_options import HuggingFaceOptions
from handlers.rolling_batch.attention import UnsupportedAttentionError
from handlers.rolling_batch.engine import RollingBatchEngine
from handlers.rolling_batch.kv_cache import bytes_per_token
from handlers.rolling_batch.model_runner import ModelRunner
from handlers.rolling_batch.peers import Peers
from handlers.rolling_batch.prompts import PromptEncoder
from handlers.rolling_batch.scheduler import Scheduler, SchedulerLimits
from handlers.rolling_batch.sharding import check_degree, join_process_group, loading_arguments, local_bytes
from lmi_server.configuration.environment import own_rank
from lmi_server.errors import ModelLoadError
from lmi_server.generation import SamplingParameters

_GIB = 2**30
# A step of the CPU takes about 30 ms to decode 32 sequences of a small model and 0.7 ms per prompt token beside them:
# at 128 tokens an inter-token gap stays within about three times its median while a long prompt arrives.
_CHUNK_SIZES = {"cpu": (128, 512), "cuda": (2048, 8192)}
# Slots beside those of running sequences, which keep what others may reuse: on the CPU they cost memory only where
# tokens are kept.
_FURTHER_SLOTS = {"cpu": 64}
_FREE_MEMORY_SHARE = {"cpu": 0.5, "cuda": 0.9}


@dataclass(frozen=True)
class LoadedEngine:
    """An engine that is ready to step, its prompt encoder, and what was decided for it."""

    engine: RollingBatchEngine
    prompts: PromptEncoder
    max_model_len: int
    kv_tokens: int
    details: dict[str, Any] = field(default_factory=dict)

    def stats(self) -> Mapping[str, float]:
        """Return the engine's gauges."""
        stats = self.engine.stats
        return {
            "running_requests": stats.running,
            "waiting_requests": stats.waiting,
            "kv_cache_used_tokens": stats.used_tokens,
            "kv_cache_usage": stats.used_tokens / self.kv_tokens,
            "engine_steps": stats.steps,
            "generated_tokens": stats.generated_tokens,
            "computed_prompt_tokens": stats.prompt_tokens,
            "cached_prompt_tokens": stats.cached_prompt_tokens,
            "retracted_requests": stats.retracted_requests,
            "kv_cache_kept_tokens": stats.kept_tokens,
            "new_token_ratio": stats.new_token_ratio,
            "gen_throughput": stats.throughput if stats.running else 0.0,
            "step_seconds": stats.step_seconds,
        }


def load_engine(model_dir: str, options: HuggingFaceOptions) -> LoadedEngine:
    """Load model and tokenizer and allocate the KV cache.

    Raises ModelLoadError, naming the remedy, where the model cannot be served by the rolling batch.
    """
    began = time.perf_counter()
    path = options.model_id or model_dir
    tokenizer = load_tokenizer(path, options)
    ranks = own_rank().size
    model = _load_model(path, options)
    weights = local_bytes(model)
    quantization = quantization_details(model)
    try:
        runner = ModelRunner(model, _peers())
        limits, max_len = _limits(runner, model, weights, options)
        _refuse_unsteady_rope(model.config, max_len)
        runner.prepare(limits.slots, max_len)
    except UnsupportedAttentionError as error:
        raise ModelLoadError(f"{type(model).__name__} cannot run under the rolling batch: {error}") from error
    engine = RollingBatchEngine(runner, Scheduler(limits), tokenizer, eos_token_ids(model, tokenizer), max_len)
    prompts = PromptEncoder(tokenizer)
    _warm_up(engine, prompts)
    details = {
        "model": type(model).__name__,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "device": str(runner.device),
        "ranks": ranks,
        "threads": torch.get_num_threads(),
        "max_model_len": max_len,
        "max_running_requests": limits.max_running,
        "kv_cache_tokens": limits.kv_tokens,
        "kv_cache_gib": round(limits.kv_tokens * runner.cache.bytes_per_token / _GIB, 3),
        "chunked_prefill_size": limits.chunk_size,
        "schedule_policy": limits.policy,
        **quantization,
        "fused_modules": runner.fused,
        "load_seconds": round(time.perf_counter() - began, 1),
    }
    return LoadedEngine(engine, prompts, max_len, limits.kv_tokens, details)


def follow(model_dir: str, options: HuggingFaceOptions) -> None:
    """Be one of the other ranks: load this rank's part of the model and do what rank 0 says, until it says stop."""
    runner = ModelRunner(_load_model(options.model_id or model_dir, options), _peers())
    runner.follow()


def _load_model(path: str, options: HuggingFaceOptions) -> Any:
    """Load the model, or of a group of ranks the part of this one."""
    _set_threads(options)
    rank = own_rank()
    if rank.size == 1:
        model = load_model(AutoModelForCausalLM, path, options)
        _refuse_spreading(model, options)
        return model
    config = load_config(path, options)
    if options.quantize or getattr(config, "quantization_config", None):
        raise ModelLoadError("quantised weights are not split over ranks; set option.tensor_parallel_degree=1")
    check_degree(config, rank.size)
    join_process_group(rank)
    return load_model(AutoModelForCausalLM, path, options, **loading_arguments(rank.size))


def _peers() -> Peers | None:
    rank = own_rank()
    return Peers(rank) if rank.size > 1 else None


def _set_threads(options: HuggingFaceOptions) -> None:
    """Let torch and numba use the same number of threads: they share libgomp's team.

    numba sets the size of the team to all cores when it starts, here at the latest; so torch's number follows.
    """
    set_threads(options)
    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    torch.set_num_threads(threads)


def _refuse_spreading(model: Any, options: HuggingFaceOptions) -> None:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise ModelLoadError(
            f"option.device_map={options.device_map} spreads the model over {len(devices)} devices, which the rolling"
            " batch cannot drive; set option.device_map=cuda:0 or leave it out"
        )


def _refuse_unsteady_rope(config: Any, max_len: int) -> None:
    """Refuse rotary embeddings that change with the longest position of a pass: a request would depend on its company.

    Raises UnsupportedAttentionError naming the length up to which they do not.
    """
    text_config = config.get_text_config()
    rope = getattr(text_config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type"), *(entry.get("rope_type") for entry in rope.values() if isinstance(entry, dict))}
    steady = rope.get("original_max_position_embeddings") or text_config.max_position_embeddings
    if kinds & {"dynamic", "longrope"} and max_len > steady:
        raise UnsupportedAttentionError(
            f"its rotary embeddings change with the length; set option.max_model_len={steady}"
        )


def _limits(runner: ModelRunner, model: Any, weights: int, options: HuggingFaceOptions) -> tuple[SchedulerLimits, int]:
    kind = runner.device.type
    per_token = bytes_per_token(runner.layers, runner.dtype)
    running = min(options.max_running_requests or options.max_rolling_batch_size, options.max_rolling_batch_size)
    slots = running + _FURTHER_SLOTS.get(kind, 0)
    max_len = _max_len(model, options)
    kv_tokens = min(slots * max_len, int(_kv_bytes(kind, weights, options) // per_token))
    if kind != "cpu":  # slots are real memory there, all of one length
        max_len = min(max_len, kv_tokens // slots)
    if kv_tokens < 16:
        raise ModelLoadError(
            f"no memory for a KV cache: a token takes {per_token} bytes; raise option.kv_cache_memory_gb or free memory"
        )
    chunk, idle_chunk = _CHUNK_SIZES.get(kind, _CHUNK_SIZES["cuda"])
    if options.chunked_prefill_size:
        chunk = idle_chunk = options.chunked_prefill_size if options.chunked_prefill_size > 0 else kv_tokens
    limits = SchedulerLimits(
        running, kv_tokens, chunk, idle_chunk, slots, options.schedule_policy, options.schedule_conservativeness
    )
    return limits, min(max_len, kv_tokens)


def _max_len(model: Any, options: HuggingFaceOptions) -> int:
    text_config = model.config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None)
    if options.max_model_len is None:
        if context is None:
            raise ModelLoadError("config.json gives no max_position_embeddings; set option.max_model_len")
        return int(context)
    if context is not None and options.max_model_len > context:
        raise ModelLoadError(
            f"option.max_model_len={options.max_model_len} is more than the model's context of {context} tokens"
        )
    return options.max_model_len


def _kv_bytes(kind: str, weights: int, options: HuggingFaceOptions) -> float:
    if options.kv_cache_memory_gb is not None:
        return options.kv_cache_memory_gb * _GIB / own_rank().size
    free, total = _memory(kind)
    if kind == "cpu":  # the ranks of a group share it
        free, total = free // own_rank().size, total // own_rank().size
    if options.mem_fraction_static is not None:
        return total * options.mem_fraction_static - weights
    return free * _FREE_MEMORY_SHARE.get(kind, 0.9)


def _memory(kind: str) -> tuple[int, int]:
    """Free and total bytes of the device."""
    if kind == "cuda":
        return torch.cuda.mem_get_info()
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {name: int(fields[name].split()[0]) for name in ("MemAvailable", "MemTotal")}
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is None:
        return kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    return min(kib["MemAvailable"] * 1024, limit - (used or 0)), min(kib["MemTotal"] * 1024, limit)


def _cgroup_bytes(name: str) -> int | None:
    """What the container's control group (v2) says; None where it says nothing or sets no limit."""
    file = Path("/sys/fs/cgroup") / name
    text = file.read_text().strip() if file.exists() else "max"
    return None if text == "max" else int(text)


def _warm_up(engine: RollingBatchEngine, prompts: PromptEncoder) -> None:
    """Run a short request, so that kernels are compiled and buffers exist before the model is ready."""
    parameters = SamplingParameters(max_new_tokens=2, ignore_eos=True, logprobs=0)
    prompt = (prompts.tokenize("a b c") or [0])[:4]
    engine.add("warm-up", prompt, parameters, "", 0, lambda output: None)
    while engine.has_work:
        engine.step()
    engine.reset_stats()
