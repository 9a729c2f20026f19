"""Loads a transformers model for the rolling batch and decides threads, KV-cache memory and chunk sizes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numba
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from handlers.huggingface_options import HuggingFaceOptions
from handlers.rolling_batch.attention import UnsupportedAttentionError
from handlers.rolling_batch.engine import RollingBatchEngine
from handlers.rolling_batch.kv_cache import bytes_per_token
from handlers.rolling_batch.model_runner import ModelRunner
from handlers.rolling_batch.prompts import PromptEncoder
from handlers.rolling_batch.scheduler import Scheduler, SchedulerLimits
from lmi_server.errors import ModelLoadError
from lmi_server.generation import SamplingParameters

_log = logging.getLogger(__name__)

_GIB = 2**30
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
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
    _set_threads(options)
    path = options.model_id or model_dir
    tokenizer = _load_tokenizer(path, options)
    model = _load_model(path, options)
    weights = model.get_memory_footprint()
    try:
        runner = ModelRunner(model)
        limits, max_len = _limits(runner, model, weights, options)
        _refuse_unsteady_rope(model.config, max_len)
        runner.prepare(limits.slots, max_len)
    except UnsupportedAttentionError as error:
        raise ModelLoadError(f"{type(model).__name__} cannot run under the rolling batch: {error}") from error
    engine = RollingBatchEngine(runner, Scheduler(limits), tokenizer, _eos_ids(model, tokenizer), max_len)
    prompts = PromptEncoder(tokenizer)
    _warm_up(engine, prompts)
    details = {
        "model": type(model).__name__,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "device": str(runner.device),
        "threads": torch.get_num_threads(),
        "max_model_len": max_len,
        "max_running_requests": limits.max_running,
        "kv_cache_tokens": limits.kv_tokens,
        "kv_cache_gib": round(limits.kv_tokens * runner.cache.bytes_per_token / _GIB, 3),
        "chunked_prefill_size": limits.chunk_size,
        "schedule_policy": limits.policy,
        "fused_modules": runner.fused,
        "load_seconds": round(time.perf_counter() - began, 1),
    }
    return LoadedEngine(engine, prompts, max_len, limits.kv_tokens, details)


def _set_threads(options: HuggingFaceOptions) -> None:
    """Let torch and numba use the same number of threads: they share libgomp's team."""
    if options.threads:
        torch.set_num_threads(options.threads)
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))


def _load_tokenizer(path: str, options: HuggingFaceOptions) -> Any:
    return _from_pretrained(AutoTokenizer, path, revision=options.revision, trust_remote_code=options.trust_remote_code)


def _load_model(path: str, options: HuggingFaceOptions) -> Any:
    config = _from_pretrained(AutoConfig, path, revision=options.revision, trust_remote_code=options.trust_remote_code)
    has_gpu = torch.cuda.is_available()
    arguments = {**({"device_map": "cuda"} if has_gpu else {}), **options.engine_arguments()}
    arguments["dtype"] = _dtype(config, options, on_cpu=not has_gpu or options.device_map == "cpu")
    model = _from_pretrained(AutoModelForCausalLM, path, **arguments)
    model.requires_grad_(False)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise ModelLoadError(
            f"option.device_map={options.device_map} spreads the model over {len(devices)} devices, which the rolling"
            " batch cannot drive; set option.device_map=cuda:0 or leave it out"
        )
    return model


def _from_pretrained(loader: Any, path: str, **arguments: Any) -> Any:
    try:
        return loader.from_pretrained(path, **arguments)
    except SafetensorError as error:
        damaged = ", ".join(_damaged_weights(Path(path))) or path
        raise ModelLoadError(f"{damaged}: SafetensorError: {error}; the file is damaged, fetch it again") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # what transformers raises for a broken directory
        raise ModelLoadError(f"{loader.__name__} cannot load {path}: {error}") from error


def _damaged_weights(directory: Path) -> Iterator[str]:
    """Yield the weights whose header cannot be read: transformers does not say which of many shards it was."""
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError:
            yield str(path)


def _dtype(config: Any, options: HuggingFaceOptions, on_cpu: bool) -> torch.dtype | str:
    if options.dtype in _DTYPES:
        return _DTYPES[options.dtype]
    if on_cpu and getattr(config, "dtype", None) == torch.float16:
        _log.warning("the checkpoint is fp16, which the CPU has no kernels for: loading as bf16; set option.dtype=fp32")
        return torch.bfloat16
    return "auto"


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
        return options.kv_cache_memory_gb * _GIB
    free, total = _memory(kind)
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


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in (*ids, tokenizer.eos_token_id) if token is not None)


def _warm_up(engine: RollingBatchEngine, prompts: PromptEncoder) -> None:
    """Run a short request, so that kernels are compiled and buffers exist before the model is ready."""
    parameters = SamplingParameters(max_new_tokens=2, ignore_eos=True, logprobs=0)
    prompt = (prompts.tokenize("a b c") or [0])[:4]
    engine.add("warm-up", prompt, parameters, "", 0, lambda output: None)
    while engine.has_work:
        engine.step()
    engine.reset_stats()
