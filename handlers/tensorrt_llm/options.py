"""The options of the tensorrt_llm handler; importable without TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from handlers.tensorrt_llm import engine_arguments, engine_fields, package
from lmi_server.configuration.declaration import Allowed, Conflict, Documented, Key, NoEffect, Unavailable
from lmi_server.configuration.engine import EngineDescription, EngineMemory, without_keys
from lmi_server.configuration.options import (
    DTYPE_NOTE,
    FloatDtype,
    Fraction,
    JsonObject,
    Names,
    NonNegativeInt,
    ParallelDegree,
    PositiveFloat,
    PositiveInt,
    Share,
    lower,
)
from lmi_server.configuration.options import ModelOptions as _ModelOptions
from lmi_server.configuration.references import NAMES_MODEL, NAMES_NOTHING, NAMES_PATH, NAMES_REVISION, NUMBERS_ONLY
from lmi_server.machine.inventory import Machine

ENGINE_REPOSITORY = "tensorrtllm_model_repo"
"""The directory beside serving.properties that holds built engines, by LMI's name."""

_ASYNC_SERVICE = "djl_python.lmi_trtllm.trtllm_async_service"  # an entry point
_SMOOTHQUANT = ("smoothquant_alpha", "smoothquant_per_token", "smoothquant_per_channel", "multi_query_mode")
_AWQ = ("awq_format", "awq_calib_size", "awq_block_size")
_CALIBRATION = (
    "calib_size",
    "calib_batch_size",
    "calib_dataset",
    "calib_batches",
    "calib_max_seq_length",
    "random_seed",
    "tokenizer_max_seq_length",
    "device",
)
# What changes the numbers or the files: the other backend must not ignore it.
_QUANTIZATION = (
    "quantize",
    "quant_algo",
    "group_size",
    "smoothquant_val",
    "clamp_val",
    "use_meta_recipe",
    "has_zero_point",
    "pre_quant_scales",
    "exclude_modules",
)
_TENSORRT_NEEDED = (*_QUANTIZATION, "trtllm_checkpoint_path", "normalize_log_probs", "save_mp_checkpoint_path")
# What changes the speed or the memory.
_TENSORRT_ONLY = (
    "max_draft_len",
    "multi_block_mode",
    "use_fused_mlp",
    "use_fp8_context_fmha",
    "embedding_parallel_mode",
    "fast_build",
    "enable_build_cache",
    "batching_type",
    "extended_runtime_perf_knob_config",
)
_KV_CACHE_KEYS = ("option.kv_cache_quant_algo", "option.kv_cache_dtype")
_PYTORCH_ONLY = (
    "use_custom_all_reduce",
    "enable_trt_overlap",
    "enable_overlap_scheduler",
    "attn_backend",
    "use_cuda_graph",
    "moe_backend",
)
_LORA = ("max_loras", "max_lora_rank", "max_cpu_loras", "lora_target_modules")
# The engine holds what these keys made; a server of a built engine must not give them again.
_BUILT_IN = (
    *("model_id", "revision", "trtllm_checkpoint_path", "save_mp_checkpoint_path", "dtype", "load_format"),
    *("max_input_len", "max_output_len", "max_seq_len", "max_num_tokens", "max_beam_width", "max_draft_len"),
    *("max_num_sequences", "max_batch_size", "tokens_per_block", "use_fused_mlp", "use_fp8_context_fmha"),
    *("rotary_base", "rotary_dim", "rotary_scaling_type", "rotary_scaling_factor"),
    *("embedding_parallel_mode", "fast_build", "enable_build_cache"),
    *(*_QUANTIZATION, "kv_cache_quant_algo", *_SMOOTHQUANT, *_AWQ, *_CALIBRATION),
)
_IN_CONFIG = NoEffect("TensorRT-LLM finds it in the model's config.json")
_OLDER_PACKAGE = " and a version of the package that has it (older than 1.2)"
_ALL_AT_ONCE = NoEffect("each rank converts and builds its own part")


def _window_sizes(value: str) -> str:
    sizes = value.strip("[] ").split(",")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError("not a list of positive integers")
    return value


def _bounds(value: str) -> str:
    if len([float(bound) for bound in value.strip("[] ").split(",")]) != 2:
        raise ValueError("not two numbers")
    return value


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


class TensorRtLlmOptions(_ModelOptions):
    """Keys of serving.properties for a model that TensorRT-LLM runs; arguments of its LLM class are passed on.

    TensorRT-LLM starts the processes of a model itself. So engine=MPI, which LMI needs for it, and engine=Python mean
    the same.
    """

    mpi_mode: Annotated[bool, NoEffect("TensorRT-LLM starts its own ranks under any engine")] = False
    """Start the model under mpirun."""
    tensor_parallel_degree: Annotated[ParallelDegree, Key(also=("option.tensor_parallel_size",))] = "max"
    """GPUs that one model is split over; max is all GPUs of the machine."""
    pipeline_parallel_degree: Annotated[PositiveInt, Key(also=("option.pipeline_parallel_size",))] = 1
    """Stages that the layers of one model are split into, each on its own devices."""
    rolling_batch: Annotated[
        Literal["auto", "trtllm", "disable"],
        BeforeValidator(lower),
        Unavailable.values("disable", instead="use trtllm; the LLM API has no encoder-decoder models such as T5"),
    ] = "trtllm"
    """TensorRT-LLM batches by itself; LMI has disable for T5 models."""
    dtype: Annotated[FloatDtype, Key(also=("option.data_type",)), DTYPE_NOTE] = "auto"
    """Data type of weights and KV cache; auto is that of the checkpoint."""
    backend: Annotated[
        Literal["auto", "tensorrt", "pytorch"],
        BeforeValidator(lambda name: "tensorrt" if lower(name) == "trt" else lower(name)),
    ] = "auto"
    """What computes: an engine that TensorRT builds when the model loads or that is in the model directory already, or
    PyTorch, which builds nothing; auto is what the installed package has: PyTorch from version 1.2 on."""
    quantize: Annotated[Literal["smoothquant", "awq", "fp8"] | None, BeforeValidator(lower)] = None
    """Quantisation of the weights while the engine is built."""
    max_input_len: PositiveInt = 1024
    """Maximum number of prompt tokens; compiled into the engine."""
    max_output_len: PositiveInt = 512
    """Maximum number of output tokens; compiled into the engine."""
    use_custom_all_reduce: bool = False
    """Use the all-reduce kernels for GPUs with NVLink; only backend=pytorch leaves the choice."""
    tokens_per_block: PositiveInt = 64
    """Tokens in one block of the paged KV cache."""
    batch_scheduler_policy: Literal["max_utilization", "guaranteed_no_evict"] = "max_utilization"
    """Whether to admit requests that may have to be evicted later."""
    kv_cache_free_gpu_mem_fraction: Annotated[Share, Key(also=("option.free_gpu_memory_fraction",))] = 0.95
    """Share of the GPU memory that the weights leave free for the KV cache."""
    max_num_sequences: Annotated[
        PositiveInt | None,
        Documented(
            "the batch size set while building Tensorrt engine",
            "equivalent: without the key the engine uses its own batch size",
        ),
    ] = None
    """Maximum number of requests in a batch; without it option.max_rolling_batch_size."""
    enable_trt_overlap: bool = False
    """Overlap the execution of batches."""
    enable_kv_cache_reuse: Annotated[bool, Key(also=("option.enable_block_reuse",))] = False
    """Reuse the KV cache of prompt prefixes that requests share."""
    baichuan_model_version: Annotated[Literal["v1_7b", "v1_13b", "v2_7b", "v2_13b"], _IN_CONFIG] = "v1_13b"
    """Version of a Baichuan model."""
    chatglm_model_version: Annotated[
        Literal[
            "unspecified",
            "chatglm_6b",
            "chatglm2_6b",
            "chatglm2_6b_32k",
            "chatglm3_6b",
            "chatglm3_6b_base",
            "chatglm3_6b_32k",
            "glm_10b",
        ],
        _IN_CONFIG,
    ] = "unspecified"
    """Version of a ChatGLM model."""
    gpt_model_version: Annotated[Literal["gpt2", "santacoder", "starcoder"], _IN_CONFIG] = "gpt2"
    """Variant of a GPT-2 model."""
    multi_block_mode: bool = False
    """Split long KV sequences into blocks; not for Qwen."""
    use_fused_mlp: bool = False
    """Fuse the gated MLP; for Llama only."""
    rotary_base: PositiveFloat = 10000.0
    """Base of the rotary embedding; for Llama, InternLM and Qwen."""
    rotary_dim: PositiveInt = 64
    """Dimensions of the rotary embedding; for GPT-J only."""
    rotary_scaling_type: Literal["linear", "dynamic"] | None = None
    """Scaling of the rotary embedding; requires rotary_scaling_factor."""
    rotary_scaling_factor: Annotated[float, Field(gt=1, allow_inf_nan=False), Allowed("a number above 1")] | None = None
    """Factor of rotary_scaling_type, which it requires."""
    smoothquant_alpha: Fraction = 0.8
    """Share of the outliers that smoothquant moves into the weights."""
    smoothquant_per_token: bool = False
    """One smoothquant scaling factor for each token."""
    smoothquant_per_channel: bool = False
    """One smoothquant scaling factor for each channel."""
    multi_query_mode: Annotated[bool, _IN_CONFIG] = False
    """The model has multi-query attention; for smoothquant."""
    awq_format: Annotated[Literal["int4_awq"], Key(also=("option.q_format",))] = "int4_awq"
    """Format of AWQ weights."""
    awq_calib_size: PositiveInt = 32
    """Number of samples that calibrate AWQ."""
    awq_block_size: PositiveInt = 128
    """Group size of AWQ."""
    calib_size: PositiveInt = 512
    """Number of samples for calibration."""
    calib_batch_size: PositiveInt = 32
    """Number of samples per batch of the calibration."""
    max_num_tokens: PositiveInt = 16384
    """Maximum number of tokens that one step computes."""
    max_draft_len: PositiveInt | None = None
    """Maximum number of tokens that a draft model proposes."""
    logits_dtype: Annotated[
        Literal["fp32", "fp16"], Unavailable.values("fp16", instead="use fp32, which the LLM API always has")
    ] = "fp32"
    """Data type of logits."""
    trtllm_checkpoint_path: Annotated[str | None, NAMES_MODEL] = None
    """Checkpoint that has been converted for TensorRT-LLM."""
    num_checkpoint_workers: Annotated[PositiveInt | None, _ALL_AT_ONCE] = None
    """Processes that convert the checkpoint."""
    num_engine_workers: Annotated[PositiveInt | None, _ALL_AT_ONCE] = None
    """Processes that build the engine."""
    load_by_shard: Annotated[bool, _ALL_AT_ONCE] = False
    """Convert the checkpoint file by file."""
    use_fp8_context_fmha: bool = False
    """Compute attention in fp8 during prefill."""
    tokenizer: Annotated[str | None, NAMES_MODEL] = None
    """Tokenizer to use instead of the model's."""
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    """Kind of tokenizer."""
    skip_tokenizer_init: bool = False
    """Accept and return token ids only."""
    tokenizer_revision: Annotated[str | None, NAMES_REVISION] = None
    """Branch, tag or commit of the tokenizer."""
    context_parallel_size: PositiveInt = 1
    """GPUs that one context is split over."""
    moe_tensor_parallel_size: PositiveInt | None = None
    """GPUs that each expert is split over."""
    moe_expert_parallel_size: PositiveInt | None = None
    """GPUs that the experts are distributed over."""
    enable_attention_dp: bool = False
    """Use data parallelism in attention."""
    auto_parallel: Annotated[
        bool, Unavailable.values(True, instead="use option.tensor_parallel_degree; TensorRT-LLM 1.x cannot choose it")
    ] = False
    """Let TensorRT-LLM choose the parallelism."""
    auto_parallel_world_size: Annotated[PositiveInt | None, NoEffect("there is no option.auto_parallel")] = None
    """GPUs for auto_parallel."""
    load_format: Annotated[Literal["auto", "dummy"], BeforeValidator(lower)] = "auto"
    """Format of the checkpoint; dummy has random weights."""
    enable_chunked_prefill: bool = False
    """Compute long prompts in chunks, in the same steps as decoding."""
    guided_decoding_backend: Annotated[Literal["xgrammar", "llguidance"] | None, BeforeValidator(lower)] = None
    """Library that enforces JSON schemas and grammars; without it such requests are refused."""
    iter_stats_max_iterations: NonNegativeInt | None = None
    """Number of steps for which statistics are kept."""
    request_stats_max_iterations: NonNegativeInt | None = None
    """Number of steps for which statistics per request are kept."""
    embedding_parallel_mode: Annotated[
        Literal["NONE", "SHARDING_ALONG_VOCAB", "SHARDING_ALONG_HIDDEN"], BeforeValidator(_upper)
    ] = "SHARDING_ALONG_VOCAB"
    """How embeddings are split over the GPUs."""
    fast_build: bool = False
    """Compile the engine faster; it then runs slower."""
    enable_build_cache: bool = True
    """Keep compiled engines for later starts."""
    batching_type: Annotated[Literal["STATIC", "INFLIGHT"] | None, BeforeValidator(_upper)] = None
    """Kind of batching of the executor."""
    normalize_log_probs: bool = False
    """Normalise log probabilities."""
    gather_generation_logits: bool = False
    """Keep the logits of generated tokens; alternatives need it with an engine of TensorRT."""
    extended_runtime_perf_knob_config: Annotated[JsonObject | None, NUMBERS_ONLY] = None
    """Further settings of the runtime."""
    max_batch_size: PositiveInt | None = None
    """Maximum number of requests; compiled into the engine."""
    max_seq_len: PositiveInt | None = None
    """Maximum number of tokens of prompt and output together."""
    max_beam_width: PositiveInt = 1
    """Maximum number of beams of a request; compiled into the engine."""
    max_loras: PositiveInt | None = None
    """Maximum number of LoRA adapters in GPU memory."""
    max_cpu_loras: PositiveInt | None = None
    """Maximum number of LoRA adapters in main memory."""
    max_lora_rank: PositiveInt = 64
    """Maximum rank of a LoRA adapter."""
    lora_target_modules: Annotated[Names, NAMES_NOTHING] = ()
    """Layers that LoRA adapters change, by TensorRT-LLM's names such as attn_q; if not set, those of attention and MLP.
    """
    max_tokens: PositiveInt | None = None
    """Maximum number of tokens in the KV cache."""
    max_attention_window: Annotated[
        Annotated[str, AfterValidator(_window_sizes), Allowed("integers separated by commas")] | None, NAMES_NOTHING
    ] = None
    """Maximum number of tokens that each layer attends to."""
    sink_token_length: PositiveInt | None = None
    """Number of first tokens that always stay in the KV cache."""
    host_cache_size: NonNegativeInt | None = None
    """Bytes of main memory for the KV cache."""
    onboard_blocks: bool = True
    """Copy offloaded KV-cache blocks back to the GPU before use."""
    cross_kv_cache_fraction: Fraction | None = None
    """Share of the KV cache for cross attention."""
    secondary_offload_min_priority: NonNegativeInt | None = None
    """Minimum priority of blocks that are offloaded."""
    event_buffer_max_size: NonNegativeInt = 0
    """Maximum number of KV-cache events that are kept."""
    enable_overlap_scheduler: bool = False
    """Schedule a step while the previous one runs."""
    kv_cache_dtype: Annotated[str | None, NAMES_NOTHING] = None
    """Data type of the KV cache, for example fp8."""
    attn_backend: Annotated[str, NAMES_NOTHING] = "TRTLLM"
    """Implementation of attention."""
    use_cuda_graph: bool = False
    """Capture decoding as a CUDA graph."""
    moe_backend: Annotated[str, NAMES_NOTHING] = "CUTLASS"
    """Implementation of mixtures of experts."""
    save_mp_checkpoint_path: Annotated[str | None, NAMES_PATH] = None
    """Where to write the compiled engine."""
    quant_algo: Annotated[str | None, NAMES_NOTHING] = None
    """Quantisation of the weights, by its name in TensorRT-LLM."""
    kv_cache_quant_algo: Annotated[str | None, NAMES_NOTHING] = None
    """Quantisation of the KV cache, by its name in TensorRT-LLM."""
    group_size: PositiveInt | None = None
    """Group size of the quantisation."""
    smoothquant_val: Fraction | None = None
    """Same as smoothquant_alpha, by its name in TensorRT-LLM."""
    clamp_val: Annotated[
        Annotated[str, AfterValidator(_bounds), Allowed("two numbers separated by a comma")] | None, NAMES_NOTHING
    ] = None
    """Bounds to which activations are clamped."""
    use_meta_recipe: bool = False
    """Quantise to fp8 by Meta's recipe for Llama."""
    has_zero_point: bool = False
    """Quantised weights have zero points."""
    pre_quant_scales: bool = False
    """Quantised weights have scales that were applied before quantisation."""
    exclude_modules: Annotated[str | None, NAMES_NOTHING] = None
    """Modules that stay unquantised, separated by commas."""
    device: Annotated[str, NAMES_NOTHING] = "cuda"
    """Device of the calibration."""
    calib_dataset: Annotated[str, NAMES_MODEL] = "cnn_dailymail"
    """Data set of the calibration."""
    calib_batches: PositiveInt = 512
    """Number of batches of the calibration."""
    calib_max_seq_length: PositiveInt = 512
    """Maximum number of tokens of a calibration sample."""
    random_seed: NonNegativeInt = 1234
    """Seed of the calibration."""
    tokenizer_max_seq_length: PositiveInt = 2048
    """Maximum number of tokens that the tokenizer produces for the calibration."""

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return the arguments of TensorRT-LLM's LLM class, nested ones as mappings.

        The entry "config.json" is none of them: it has the changes to the model's config.json, which the class reads.
        """
        return engine_arguments.build(self)

    @property
    def is_async_service(self) -> bool:
        return self.async_mode or self.entry_point == _ASYNC_SERVICE

    @property
    def ranks(self) -> int | None:
        """Return None: TensorRT-LLM starts its own ranks, and only one process serves."""
        return None

    def context_length(self) -> int | None:
        return self.max_seq_len or self.max_input_len + self.max_output_len

    def max_running(self) -> int:
        """Return how many sequences the engine computes together."""
        return self.max_num_sequences or self.max_batch_size or self.max_rolling_batch_size

    def conflicts(self, given: Collection[str]) -> Iterator[Conflict]:
        pair = ("option.rotary_scaling_type", "option.rotary_scaling_factor")
        if (self.rotary_scaling_type is None) != (self.rotary_scaling_factor is None):
            yield Conflict(pair, "rotary_scaling_type and rotary_scaling_factor only together")
        if self.max_num_sequences is not None and self.max_batch_size not in (None, self.max_num_sequences):
            keys = ("option.max_num_sequences", "option.max_batch_size")
            yield Conflict(keys, "one of the two, or the same value: both are the batch size of the engine")
        if self.runs_elsewhere:  # with another package than this process would import
            return
        if self.runs_on == "pytorch":
            yield from self._conflicts_on_pytorch(given)
        else:
            yield from self._conflicts_on_tensorrt()
        found = package.installed()
        if self.backend == "tensorrt" and found.version and not found.builds_engines:
            without = f"auto or pytorch with TensorRT-LLM {found.version}, which builds no engines"
            yield Conflict(("option.backend",), f"{without}; or {package.INSTALL_OLDER}")

    def _conflicts_on_pytorch(self, given: Collection[str]) -> Iterator[Conflict]:
        """Yield what only an engine of TensorRT has, and what has it."""
        for key in (f"option.{name}" for name in _TENSORRT_NEEDED):
            if key in given:
                yield Conflict((key,), f"nothing {self._on_pytorch}; {_instead_on_pytorch(key)}")
        algorithm = self.kv_cache_quant_algo
        if algorithm is not None and algorithm.upper() not in engine_arguments.ON_PYTORCH:
            allowed = " or ".join(engine_arguments.ON_PYTORCH)
            yield Conflict(("option.kv_cache_quant_algo",), f"{allowed} {self._on_pytorch}")
        elif algorithm is not None and self.kv_cache_dtype not in (
            None,
            engine_arguments.ON_PYTORCH[algorithm.upper()],
        ):
            yield Conflict(_KV_CACHE_KEYS, f"one of the two {self._on_pytorch}: both are the data type of the KV cache")

    def _conflicts_on_tensorrt(self) -> Iterator[Conflict]:
        dtype, algorithm = self.kv_cache_dtype, self.kv_cache_quant_algo
        if dtype not in (None, "auto", "fp8", "int8"):
            yield Conflict(("option.kv_cache_dtype",), "auto, fp8 or int8 with option.backend=tensorrt")
        elif dtype and algorithm and algorithm.upper() != engine_arguments.KV_CACHE_ALGORITHMS.get(dtype):
            where = "with option.backend=tensorrt"
            yield Conflict(_KV_CACHE_KEYS, f"one of the two {where}: both are the data type of the KV cache")

    @property
    def _on_pytorch(self) -> str:
        if self.backend == "pytorch":
            return "with option.backend=pytorch"
        version = package.installed().version
        return f"with TensorRT-LLM {version or 'from 1.2 on'}, which runs models on PyTorch"

    @property
    def runs_on(self) -> package.Backend:
        """Return what computes, for `auto` by the package that this process would import.

        Without one it is what the newest has, or what the values need: `check` then names the package to install.
        """
        if self.backend != "auto":
            return self.backend
        found = package.installed()
        needs_engine = found.root is None and not self.model_fields_set.isdisjoint(_TENSORRT_NEEDED)
        return "tensorrt" if needs_engine else found.backend


class TensorRtLlmMemory(EngineMemory[TensorRtLlmOptions]):
    """What TensorRT-LLM keeps of its requests."""

    def max_running(self) -> int:
        return self.options.max_running()


class TensorRtLlmEngine(EngineDescription[TensorRtLlmOptions]):
    """TensorRT-LLM."""

    memory_type = TensorRtLlmMemory

    @property
    def install_command(self) -> str:
        return package.INSTALL_OLDER if self.options.runs_on == "tensorrt" else self.spec.installed_by

    @classmethod
    def argument_names(cls) -> frozenset[str]:
        return engine_fields.passed_on()

    @property
    def keeps_prefixes(self) -> bool:
        return self.options.enable_kv_cache_reuse

    def worker_environment(self) -> Mapping[str, str]:
        return {"TOKENIZERS_PARALLELISM": "false"}  # its threads would not survive the start of TensorRT-LLM's ranks

    def without_effect(self, machine: Machine) -> Iterator[tuple[str, Collection[str]]]:
        options = self.options
        if options.quantize != "smoothquant":
            yield "option.quantize=smoothquant", _SMOOTHQUANT
        if options.quantize != "awq":
            yield "option.quantize=awq", _AWQ
        if options.quantize is None and options.quant_algo is None:
            yield "option.quantize or option.quant_algo", _CALIBRATION
        if options.backend == "auto" and options.runs_elsewhere:
            pass  # the package there decides what computes
        elif options.runs_on == "pytorch":
            builds = package.installed().builds_engines or options.backend == "pytorch"
            yield "option.backend=tensorrt" + ("" if builds else _OLDER_PACKAGE), _TENSORRT_ONLY
        else:
            yield "option.backend=pytorch", _PYTORCH_ONLY
        if not options.enable_lora:
            yield "option.enable_lora=true", _LORA

    def division(self, gpus: int) -> str | None:
        return f"TensorRT-LLM starts a rank for each of {gpus} GPUs" if gpus > 1 else None

    def partition(self, config: Mapping[str, Any]) -> Mapping[str, str | None] | str:
        if self.options.runs_on != "tensorrt":
            return f"TensorRT-LLM on PyTorch builds no engine; serve the model as it is, or {package.to_have_engines()}"
        degree = {"option.tensor_parallel_degree": str(self.options.devices_per_worker or 1)}
        return without_keys(*_BUILT_IN) | degree


def _instead_on_pytorch(key: str) -> str:
    if key.removeprefix("option.") in _QUANTIZATION:
        return f"name a checkpoint that is quantised already in option.model_id, or {package.to_have_engines()}"
    return f"remove it, or {package.to_have_engines()}"
