"""The options of vLLM's, SGLang's and text-generation-inference's servers, and the keys that they become."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lmi_server.configuration.model_file.read import OUR_NAMES, engine_argument_names
from lmi_server.migrate.command_line import Flag, read_flags
from lmi_server.migrate.migration import Migration

Rule = str | Callable[[Migration, Flag], None]
"""The key that an option becomes, or a function that carries it over."""

_SERVE = "a setting of the server: lmi-server serve"
_HUMAN = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([kKmMgG])")
_QUANTIZE = {"bitsandbytes": "bitsandbytes8", "bitsandbytes-nf4": "bitsandbytes4", "bitsandbytes-fp4": "bitsandbytes4"}
_SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def _value(flag: Flag) -> str:
    return " ".join(flag.values) if flag.values else "true"


def _model(migration: Migration, flag: Flag) -> None:
    migration.carry_model(flag.origin, _value(flag))


def _names(migration: Migration, flag: Flag) -> None:
    migration.carry(flag.origin, "option.served_model_name", ",".join(flag.values))


def _workers(migration: Migration, flag: Flag) -> None:
    if _value(flag) == "1":
        migration.carry(flag.origin, "minWorkers", 1)
        return
    for key in ("minWorkers", "maxWorkers"):
        migration.carry(
            flag.origin, key, _value(flag), "each worker has an engine of its own, and one queue feeds them"
        )


def _adapters(migration: Migration, flag: Flag) -> None:
    migration.carry(
        flag.origin, "option.enable_lora", True, "put each adapter into adapters/NAME of the model directory"
    )


def _secret(migration: Migration, flag: Flag) -> None:
    migration.differ(flag.written, "a secret, which is not written: SERVING_API_KEYS, or HF_TOKEN for the Hub")


def _listen(migration: Migration, flag: Flag) -> None:
    option = {"hostname": "host"}.get(flag.name, flag.name)
    migration.differ(flag.origin, f"{_SERVE} --{option} {_value(flag)}")


def _differs(text: str) -> Rule:
    return lambda migration, flag: migration.differ(flag.origin, text)


def _drops(text: str) -> Rule:
    return lambda migration, flag: migration.drop(flag.origin, text)


_TLS = _differs("settings of the server: tls, certificate_file and private_key_file")
_CACHE = _differs("a setting of the server: download_dir, or the variable HF_HOME")
_LOG = _differs("settings of the server: log_level, log_format, access_log")
_IDLE = _drops("the server does so by itself, or has no such thing")


def _mapping_rule(key: str, values: Mapping[str, str], differs: str = "") -> Rule:
    return lambda migration, flag: migration.carry(flag.origin, key, values.get(_value(flag), _value(flag)), differs)


def _template(migration: Migration, flag: Flag) -> None:
    value = _value(flag)
    if "/" in value or value.endswith((".jinja", ".jinja2")) or "{" in value:
        migration.carry(flag.origin, "option.chat_template", value)
    else:
        migration.drop(flag.origin, "the name of a built-in template; the model's own is used, or name a file")


def _human(key: str) -> Rule:
    """Return the rule of a number that may be written as 32k (32,000) or 32K (32,768)."""

    def carry(migration: Migration, flag: Flag) -> None:
        found = _HUMAN.fullmatch(_value(flag))
        value = _value(flag) if found is None else str(int(float(found[1]) * _SCALES[found[2]]))
        if value in ("-1", "auto"):
            migration.drop(flag.origin, "the server chooses it by itself")
        else:
            migration.carry(flag.origin, key, value)

    return carry


def _unless(key: str, values: Sequence[str], reason: str) -> Rule:
    def carry(migration: Migration, flag: Flag) -> None:
        if _value(flag) in values:
            migration.drop(flag.origin, reason)
        else:
            migration.carry(flag.origin, key, _value(flag))

    return carry


def _quantize(migration: Migration, flag: Flag) -> None:
    value = _QUANTIZE.get(_value(flag))
    migration.carry(flag.origin, "option.quantize", value or _value(flag))
    if value is not None:
        migration.carry(flag.origin, "option.rolling_batch", "scheduler", "vLLM has no bitsandbytes here")


def _drafts(migration: Migration, flag: Flag) -> None:
    migration.carry(flag.origin, "option.speculative_draft_model", "[ngram]", "drafts are what followed the same words")
    migration.carry(flag.origin, "option.speculative_length", _value(flag))


_SWITCHES = frozenset(
    [
        "trust_remote_code",
        "enforce_eager",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "enable_lora",
        "fully_sharded_loras",
        "enable_auto_tool_choice",
        "enable_reasoning",
        "enable_expert_parallel",
        "disable_log_requests",
        "disable_log_stats",
        "skip_tokenizer_init",
        "disable_sliding_window",
        "disable_custom_all_reduce",
        "enable_sleep_mode",
        "async_scheduling",
        "enable_log_requests",
        "return_tokens_as_token_ids",
        "disable_frontend_multiprocessing",
        "headless",
        "use_v2_block_manager",
        "enable_request_id_headers",
        "disable_fastapi_docs",
        "allow_credentials",
        "disable_cascade_attn",
        "enable_eplb",
        "enable_prompt_tokens_details",
        "enable_server_load_tracking",
        "calculate_kv_scales",
        "generation_config_from_model",
        "disable_hybrid_kv_cache_manager",
        "enable_force_include_usage",
        "disable_async_output_proc",
        "multi_step_stream_outputs",
        "enable_prompt_embeds",
        "language_model_only",
        "interleave_mm_strings",
        "disable_mm_preprocessor_cache",
        "use_tqdm_on_load",
        "enable_dbo",
        "enable_return_routed_experts",
        "enable_tokenizer_info_endpoint",
        "ray_workers_use_nsight",
        "is_embedding",
        "enable_multimodal",
        "log_requests",
        "enable_metrics",
        "disable_radix_cache",
        "disable_cuda_graph",
        "enable_torch_compile",
        "disable_overlap_schedule",
        "enable_mixed_chunk",
        "enable_dp_attention",
        "enable_ep_moe",
        "enable_p2p_check",
        "enable_hierarchical_cache",
        "skip_server_warmup",
        "show_time_cost",
        "enable_nccl_nvls",
        "disable_cuda_graph_padding",
        "disable_chunked_prefix_cache",
        "enable_memory_saver",
        "grpc_mode",
        "enable_cache_report",
        "allow_auto_truncate",
        "enable_deterministic_inference",
        "json_output",
        "disable_grammar_support",
        "disable_custom_kernels",
        "env",
        "ngrok",
        "disable_usage_stats",
    ]
)
"""The options of any of these engines that take no value: none takes one in another engine."""


@dataclass(frozen=True, slots=True)
class MigratedEngine:
    """How one engine's command line is read: what it is called, its rules, and which of its options are lists."""

    title: str
    rules: Mapping[str, Rule]
    lists: frozenset[str] = frozenset()
    short: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    passes_arguments: bool = False


_SERVER: dict[str, Rule] = {
    **dict.fromkeys(("host", "hostname", "port"), _listen),
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_keyfile_password"), _TLS),
    **dict.fromkeys(("api_key", "hf_token", "admin_api_key", "ngrok_authtoken"), _secret),
    **dict.fromkeys(("log_level", "uvicorn_log_level", "json_output", "log_requests", "disable_log_requests"), _LOG),
    **dict.fromkeys(("disable_log_stats", "enable_metrics", "enable_log_requests", "max_log_len"), _IDLE),
    **dict.fromkeys(("download_dir", "huggingface_hub_cache", "weights_cache_override"), _CACHE),
    "served_model_name": _names,
    "chat_template": _template,
}
_VLLM = MigratedEngine(
    title="vLLM",
    rules={
        **_SERVER,
        "model": _model,
        "": _model,
        "data_parallel_size": _workers,
        "lora_modules": _adapters,
        "max_model_len": _human("option.max_model_len"),
        "max_num_batched_tokens": _human("option.max_rolling_batch_prefill_tokens"),
        "dtype": _mapping_rule("option.dtype", {"half": "fp16", "float": "fp32"}),
        "config": _drops("the file is not read; write its options out"),
        **dict.fromkeys(("root_path", "middleware", "allowed_origins", "allow_credentials", "response_role"), _IDLE),
        **dict.fromkeys(("return_tokens_as_token_ids", "disable_frontend_multiprocessing", "api_server_count"), _IDLE),
        **dict.fromkeys(("disable_fastapi_docs", "enable_request_id_headers", "headless", "uds"), _IDLE),
    },
    lists=frozenset({"served_model_name", "lora_modules", "middleware", "allowed_origins", "cudagraph_capture_sizes"}),
    short={
        "-tp": "tensor_parallel_size",
        "-pp": "pipeline_parallel_size",
        "-dp": "data_parallel_size",
        "-q": "quantization",
        "-cc": "compilation_config",
        "-O": "optimization_level",
        "-ac": "attention_config",
    },
    keys={"option.rolling_batch": "vllm"},
    passes_arguments=True,
)
_SGLANG = MigratedEngine(
    title="SGLang",
    rules={
        **_SERVER,
        **dict.fromkeys(("model_path", "model", ""), _model),
        **dict.fromkeys(("tp", "tp_size", "tensor_parallel_size"), "option.tensor_parallel_degree"),
        **dict.fromkeys(("dp", "dp_size", "data_parallel_size"), _workers),
        **dict.fromkeys(("pp", "pp_size", "pipeline_parallel_size"), "option.pipeline_parallel_degree"),
        "context_length": "option.max_model_len",
        "mem_fraction_static": "option.mem_fraction_static",
        "chunked_prefill_size": _unless("option.chunked_prefill_size", ["-1"], "prompts are always computed in chunks"),
        "max_running_requests": "option.max_running_requests",
        "max_prefill_tokens": "option.max_rolling_batch_prefill_tokens",
        "schedule_policy": _unless("option.schedule_policy", ["random", "dfs-weight", "lof"], "there are lpm and fcfs"),
        "schedule_conservativeness": "option.schedule_conservativeness",
        "dtype": _mapping_rule("option.dtype", {"half": "fp16", "float": "fp32"}),
        "kv_cache_dtype": _mapping_rule(
            "option.kv_cache_dtype", {"fp8_e5m2": "fp8", "fp8_e4m3": "fp8", "bf16": "auto"}
        ),
        "quantization": "option.quantize",
        "trust_remote_code": "option.trust_remote_code",
        "revision": "option.revision",
        "disable_cuda_graph": lambda migration, flag: migration.carry(flag.origin, "option.enable_cuda_graph", False),
        "enable_torch_compile": "option.enable_torch_compile",
        "tool_call_parser": "option.tool_call_parser",
        "reasoning_parser": "option.reasoning_parser",
        **dict.fromkeys(("lora_paths", "enable_lora"), _adapters),
        "is_embedding": lambda migration, flag: migration.carry(flag.origin, "option.task", "text-embedding"),
    },
    lists=frozenset({"lora_paths", "cuda_graph_bs", "lora_target_modules"}),
    keys={"option.rolling_batch": "scheduler"},  # which has SGLang's settings
)
_TGI = MigratedEngine(
    title="text-generation-inference",
    rules={
        **_SERVER,
        **dict.fromkeys(("model_id", ""), _model),
        "revision": "option.revision",
        "num_shard": "option.tensor_parallel_degree",
        "sharded": _unless("option.tensor_parallel_degree", ["true", "false"], "the number of shards decides"),
        "quantize": _quantize,
        "kv_cache_dtype": _mapping_rule("option.kv_cache_dtype", {"fp8_e5m2": "fp8", "fp8_e4m3fn": "fp8"}),
        "dtype": "option.dtype",
        "trust_remote_code": "option.trust_remote_code",
        "max_concurrent_requests": _mapping_rule("job_queue_size", {}, "waiting requests, not counting running ones"),
        **dict.fromkeys(
            ("max_input_tokens", "max_input_length"), _differs("only prompt and output together have a limit")
        ),
        "max_total_tokens": "option.max_model_len",
        "max_batch_prefill_tokens": "option.max_rolling_batch_prefill_tokens",
        "max_batch_size": "option.max_rolling_batch_size",
        "max_batch_total_tokens": _differs("follows from the memory; option.kv_cache_memory_gb sets that"),
        "cuda_memory_fraction": _differs(
            "option.mem_fraction_static of the scheduler, option.gpu_memory_utilization of vLLM"
        ),
        **dict.fromkeys(("waiting_served_ratio", "max_waiting_tokens"), _IDLE),
        "speculate": _drafts,
        "lora_adapters": _adapters,
    },
)
_PROGRAMS: Mapping[str, MigratedEngine] = {
    "vllm": _VLLM,
    "vllm.entrypoints.openai.api_server": _VLLM,
    "vllm.entrypoints.api_server": _VLLM,
    "sglang": _SGLANG,
    "sglang.launch_server": _SGLANG,
    "text-generation-launcher": _TGI,
    "text-generation-server": _TGI,
    "huggingfaceserver": _VLLM,
}
_IMAGES: Mapping[re.Pattern[str], MigratedEngine] = {
    re.compile(r"(?i)vllm|rhaii"): _VLLM,
    re.compile(r"(?i)sglang"): _SGLANG,
    re.compile(r"(?i)text-generation-inference|\btgi\b"): _TGI,
}
_SUBCOMMANDS = frozenset({"serve", "server"})


def engine_of_program(program: str) -> MigratedEngine | None:
    """Return the engine that a program or a Python module starts."""
    return _PROGRAMS.get(program)


def engine_of_image(image: str) -> MigratedEngine | None:
    """Return the engine of a container's image, by its name."""
    return next((engine for pattern, engine in _IMAGES.items() if pattern.search(image)), None)


def vllm() -> MigratedEngine:
    """Return the engine whose arguments other servers pass on."""
    return _VLLM


def carry_options(migration: Migration, engine: MigratedEngine, words: Sequence[str]) -> None:
    """Carry over every option of an engine's command line."""
    if words[:1] and words[0] in _SUBCOMMANDS:
        words = words[1:]
    for key, value in engine.keys.items():
        migration.carry(f"the server {engine.title}", key, value)
    nested: dict[str, dict[str, object]] = {}
    for flag in read_flags(words, _SWITCHES, engine.lists, engine.short):
        if "." in flag.name:
            _put(nested, flag)
        else:
            carry_option(migration, engine, flag)
    for name, values in nested.items():
        carry_option(migration, engine, Flag(f"--{name.replace('_', '-')}", name, (json.dumps(values),)))


def carry_option(migration: Migration, engine: MigratedEngine, flag: Flag) -> None:
    """Carry one option over by its rule, or as an argument that the engine gets."""
    rule = engine.rules.get(flag.name)
    if isinstance(rule, str):
        migration.carry(flag.origin, rule, _value(flag))
    elif rule is not None:
        rule(migration, flag)
    elif engine.passes_arguments:
        _carry_argument(migration, flag)
    else:
        migration.drop(flag.origin)


def _carry_argument(migration: Migration, flag: Flag) -> None:
    """Carry over an argument of vLLM under the key that stands for it; `--no-NAME` is its opposite."""
    known, name, value = _known_arguments(), flag.name, _value(flag)
    if name.startswith("no_") and name not in known:
        name, value = name.removeprefix("no_"), "false"
    if known and name not in known and OUR_NAMES.get(name) is None:
        migration.drop(flag.origin, "the engine here has no such argument")
    else:
        migration.carry(flag.origin, f"option.{OUR_NAMES.get(name, name)}", value)


@functools.cache
def _known_arguments() -> frozenset[str]:
    return engine_argument_names()


def _put(nested: dict[str, dict[str, object]], flag: Flag) -> None:
    """Put the value of --name.part.part into the JSON object of --name."""
    name, *parts = flag.name.split(".")[:10]
    place: dict[str, object] = nested.setdefault(name, {})
    for part in parts[:-1]:
        inner = place.setdefault(part, {})
        place = inner if isinstance(inner, dict) else place
    try:
        place[parts[-1]] = json.loads(_value(flag))
    except (ValueError, RecursionError):
        place[parts[-1]] = _value(flag)
