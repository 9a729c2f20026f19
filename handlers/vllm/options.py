"""The options of the vllm handler; importable without vLLM."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from handlers.chats.options import TOOL_PARSER_NOTE
from handlers.chats.templates import AUTO
from handlers.checkpoints.chat_template import CHAT_TEMPLATE_DESCRIPTION
from handlers.checkpoints.options import BLOCK_FORMATS, QUANTIZATION
from handlers.generation.media_options import MediaOptions
from handlers.structured_output.options import WhiteSpaceLimit
from handlers.vllm import engine_fields
from lmi_server.configuration.declaration import Allowed, Conflict, Documented, Key, NoEffect, Unavailable
from lmi_server.configuration.options import (
    DTYPE_NOTE,
    LONG_DTYPES,
    NGRAM,
    STOP_SEQUENCE_DESCRIPTION,
    Dtype,
    JsonObject,
    NonNegativeFloat,
    ParallelDegree,
    PositiveFloat,
    PositiveInt,
    Share,
    Texts,
    lower,
)
from lmi_server.configuration.references import (
    NAMES_CONNECTOR,
    NAMES_DRAFT,
    NAMES_DRAFTING,
    NAMES_NOTHING,
    NAMES_PATH,
    NAMES_TEMPLATE,
)
from lmi_server.configuration.tasks import POOLING, Workload

_GENERATING = ("auto", "generate", "text-generation", "text2text-generation", "conversational", "image-text-to-text")
_PARTITION = NoEffect("only LMI's offline command `partition` reads it")


class VllmEngineOptions(MediaOptions):
    """Keys of serving.properties for any model that vLLM runs; other arguments of its engine are passed on."""

    max_rolling_batch_size: Annotated[PositiveInt, Key(also=("option.max_num_seqs",), must_agree=True)] = 32
    """Maximum number of requests that the engine decodes together. If nothing sets it, 256 counts: as in LMI, because
    vLLM's paged KV cache takes as many as fit."""
    load_format: Annotated[str, NAMES_NOTHING] = "auto"
    """Format of the checkpoint; auto prefers safetensors to bin files."""
    max_model_len: PositiveInt | None = None
    """Maximum number of tokens of prompt and output together; without it the limit in config.json."""
    enforce_eager: bool = False
    """Run the model uncompiled and without CUDA graphs: slower, but saves some GB of GPU memory."""
    gpu_memory_utilization: Share = 0.9
    """Share of GPU memory for weights, activations and KV cache together."""
    max_loras: PositiveInt = 4
    """Maximum number of LoRA adapters in one batch."""
    max_lora_rank: PositiveInt = 16
    """Maximum rank of a LoRA adapter."""
    lora_extra_vocab_size: PositiveInt = 256
    """Maximum number of tokens that a LoRA adapter adds to the vocabulary."""
    max_cpu_loras: PositiveInt | None = None
    """Maximum number of LoRA adapters that stay in main memory."""
    tensor_parallel_degree: Annotated[ParallelDegree, Key(also=("option.tensor_parallel_size",), must_agree=True)] = 1
    """GPUs that one model is split over; max is all GPUs of the machine."""
    pipeline_parallel_degree: Annotated[PositiveInt, Key(also=("option.pipeline_parallel_size",), must_agree=True)] = 1
    """Stages that the layers of one model are split into, each on its own devices."""
    dtype: Annotated[
        Dtype,
        Key(also=("option.data_type",)),
        DTYPE_NOTE,
        Unavailable.values(
            "int8",
            instead="use option.rolling_batch=scheduler with it, or option.quantize=int8_per_channel_weight_only"
            " for a mixture of experts",
        ),
    ] = "auto"
    """Data type of weights and KV cache; auto is that of the checkpoint, or fp16 if that is fp32."""
    task: Annotated[str | None, NAMES_NOTHING] = None
    """Task of the model: text-generation, text-embedding, classify, ..."""
    quantize: Annotated[str | None, Key(also=("option.quantization",), must_agree=True), NAMES_NOTHING] = None
    """Quantisation that the checkpoint was made with (awq, gptq, squeezellm, ...)."""
    max_rolling_batch_prefill_tokens: Annotated[
        PositiveInt | None, Key(also=("option.max_num_batched_tokens",), must_agree=True)
    ] = None
    """Maximum number of tokens that one step computes; without it vLLM chooses."""
    cpu_offload_gb_per_gpu: Annotated[NonNegativeFloat, Key(also=("option.cpu_offload_gb",), must_agree=True)] = 0.0
    """GiB of weights per GPU that stay in main memory."""
    enable_chunked_prefill: bool | None = None
    """Compute long prompts in chunks, in the same steps as decoding."""
    enable_prefix_caching: bool | None = None
    """Reuse the KV cache of prompt prefixes that requests share."""
    disable_sliding_window: bool = False
    """Attend to the whole context even if the model has a sliding window."""
    enable_expert_parallel: bool = False
    """Split a mixture of experts by expert instead of splitting each expert."""
    tokenizer_mode: Annotated[str, NAMES_NOTHING] = "auto"
    """Kind of tokenizer: auto, slow, mistral, ..."""
    limit_mm_per_prompt: Annotated[JsonObject | None, NAMES_NOTHING] = None
    """Maximum number of images, videos and other media per prompt, by kind."""
    kv_transfer_config: Annotated[JsonObject | None, NAMES_CONNECTOR] = None
    """Transfer of the KV cache between engines, as vLLM's JSON object."""
    speculative_config: Annotated[JsonObject | None, NAMES_DRAFTING] = None
    """Speculative decoding, as vLLM's JSON object."""
    speculative_draft_model: Annotated[str | None, NAMES_DRAFT] = None
    """Model that drafts tokens for speculative decoding; [ngram] drafts what followed the same words earlier in prompt
    and output."""
    speculative_length: PositiveInt = 5
    """Tokens that are drafted per step."""
    draft_model_tp_size: PositiveInt | None = None
    """Devices that the draft model is split over; without it those of the model."""
    fully_sharded_loras: bool = False
    """Split all LoRA computations over the GPUs."""
    long_lora_scaling_factors: Annotated[str | None, NoEffect("vLLM has no such argument any more"), NAMES_NOTHING] = (
        None
    )
    """Scaling factors of long-context LoRA adapters."""
    lora_dtype: Annotated[str, NAMES_NOTHING] = "auto"
    """Data type of LoRA weights."""
    max_logprobs: PositiveInt = 20
    """Maximum number of log probabilities per token that a request may ask for."""
    max_json_whitespace: WhiteSpaceLimit = None
    chat_template: Annotated[str | None, NAMES_TEMPLATE] = Field(None, description=CHAT_TEMPLATE_DESCRIPTION)
    stop_sequence: Annotated[Texts, NAMES_NOTHING] = Field((), description=STOP_SEQUENCE_DESCRIPTION)
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    """Form of message contents that the chat template expects."""
    enable_auto_tool_choice: Annotated[
        bool, Documented("false", "a parser that the chat template chooses lets the model choose tools")
    ] = False
    """Let the model choose tools; if not set, true only with tool_call_parser=auto."""
    tool_call_parser: Annotated[str, TOOL_PARSER_NOTE, NAMES_NOTHING] = AUTO
    """Name of vLLM's parser for the model's tool calls; auto chooses by the chat template."""
    enable_reasoning: bool = False
    """Answer with the reasoning apart from the content; requires reasoning_parser."""
    reasoning_parser: Annotated[str | None, NAMES_NOTHING] = None
    """Name of vLLM's parser for the model's reasoning."""
    normalize: Annotated[bool, NoEffect("only embeddings are normalised")] = True
    """Normalise embeddings."""
    lmcache_auto_config: bool = False
    """Configure LMCache for the machine; allows one worker only."""
    lmcache_config_file: Annotated[str | None, NAMES_PATH] = None
    """Configuration file of LMCache."""
    device: Annotated[str, NoEffect("vLLM runs on what it was built for"), NAMES_NOTHING] = "auto"
    """Kind of device that vLLM runs on."""
    compilation: Annotated[Literal["background", "start"], BeforeValidator(lower)] = "start"
    """When vLLM compiles the model, unless enforce_eager is true: at its start, or (the default without GPUs) in the
    background while requests already run. The background needs an engine in the worker's process alone and without
    LoRA; otherwise background means never, or at the start if enforce_eager=false is set."""
    engine_process: Annotated[Literal["own", "worker"], BeforeValidator(lower)] = "own"
    """Process of vLLM's engine: its own, or (the default without GPUs) the worker's."""
    threads: PositiveInt | None = None
    """Threads of an operation on the CPU, if the engine is in the worker's process. By default, without GPUs, the
    workers of the model (maxWorkers) divide the cores that the server may use."""
    kv_cache_memory_gb: PositiveFloat | None = None
    """Memory of the KV cache in GiB. Without it and without gpu_memory_utilization, a machine without GPUs gives the KV
    cache a quarter of its free memory at most."""
    save_mp_checkpoint_path: Annotated[str | None, _PARTITION, NAMES_PATH] = None
    """Where to write the result."""
    awq_zero_point: Annotated[bool, _PARTITION] = True
    """AWQ with zero points."""
    awq_block_size: Annotated[PositiveInt, _PARTITION] = 128
    """Group size of AWQ."""
    awq_weight_bit_width: Annotated[PositiveInt, _PARTITION] = 4
    """Bits per weight of AWQ."""
    awq_mm_version: Annotated[str, _PARTITION, NAMES_NOTHING] = "GEMM"
    """Kernel that the AWQ checkpoint is for."""
    awq_ignore_layers: Annotated[str | None, _PARTITION, NAMES_NOTHING] = None
    """Layers that AWQ does not quantise."""
    fp8_scheme: Annotated[str, _PARTITION, NAMES_NOTHING] = "FP8"
    """Scheme of fp8 quantisation."""
    fp8_ignore: Annotated[str, _PARTITION, NAMES_NOTHING] = "lm_head"
    """Layers that fp8 does not quantise."""
    calib_size: Annotated[PositiveInt, _PARTITION] = 512
    """Samples for calibration."""

    def passed_to_engine(self) -> Mapping[str, str]:
        """Return the undeclared values that vLLM knows, by its own names and as text."""
        return self.undeclared_values(engine_fields.names())

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return the arguments of vLLM's EngineArgs; arguments under vLLM's own names are text."""
        arguments = {
            "scheduling_policy": "priority",  # vLLM's own default, fcfs, does not look at the priority of a request
            **self.passed_to_engine(),
            "model": self.model_id,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            "dtype": LONG_DTYPES.get(self.dtype, self.dtype),
            "tensor_parallel_size": self.tensor_parallel_degree,
            "pipeline_parallel_size": self.pipeline_parallel_degree,
            "max_num_seqs": self.max_rolling_batch_size,
            "max_num_batched_tokens": self.max_rolling_batch_prefill_tokens,
            "quantization": self.quantize,
            "cpu_offload_gb": self.cpu_offload_gb_per_gpu,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": self._kv_cache_bytes_per_device(),
            **{name: getattr(self, name) for name in _SAME_NAMES},
            **{name: json.loads(text) for name in _JSON_TEXTS if (text := getattr(self, name)) is not None},
            **self._drafting_arguments(),
            **self._lora_arguments(),
            "allowed_media_domains": list(self.allowed_media_domains) or None,
            "enforce_eager": self.runs_uncompiled,
        }
        return {name: value for name, value in arguments.items() if value is not None}

    @property
    def runs_uncompiled(self) -> bool:
        """Whether the model is never compiled.

        If it cannot be compiled in the background, an explicit option.enforce_eager=false makes vLLM compile at start.
        """
        cannot = self.compilation == "background" and not self.compiles_in_background
        return self.enforce_eager or (cannot and "enforce_eager" not in self.model_fields_set)

    @property
    def compiles_in_background(self) -> bool:
        """Whether the model is compiled while it already serves.

        That replaces code inside the engine's process, so the engine must be in the worker's process, and only there.
        With LoRA vLLM compiles nothing on the CPU. With a KV connector the compiling process would start a second
        connector, which could meet the first one.
        """
        if self.compilation != "background" or self.enforce_eager or self.enable_lora or self.kv_transfer_config:
            return False
        return self.engine_process == "worker" and self.devices_per_worker == 1

    def _kv_cache_bytes_per_device(self) -> int | None:
        """Return the bytes of KV cache in vLLM's unit: per GPU, or per process that computes on the CPU."""
        if self.kv_cache_memory_gb is None:
            return None
        return int(self.kv_cache_memory_gb * 2**30) // (self.devices_per_worker or 1)

    def _drafting_arguments(self) -> dict[str, Any]:
        """Return vLLM's argument for LMI's keys of speculative decoding; empty without a draft model."""
        if self.speculative_draft_model is None:
            return {}
        if self.speculative_draft_model == NGRAM:
            drafts: dict[str, Any] = {"method": "ngram"}
        elif self.draft_model_tp_size is None:
            drafts = {"model": self.speculative_draft_model}
        else:
            drafts = {"model": self.speculative_draft_model, "draft_tensor_parallel_size": self.draft_model_tp_size}
        return {"speculative_config": {**drafts, "num_speculative_tokens": self.speculative_length}}

    def _lora_arguments(self) -> dict[str, Any]:
        if not self.enable_lora:
            return {}
        names = ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "fully_sharded_loras", "lora_dtype")
        return {name: getattr(self, name) for name in names}

    @property
    def default_stops(self) -> tuple[str, ...]:
        return self.stop_sequence

    def context_length(self) -> int | None:
        return self.max_model_len

    def conflicts(self, given: Collection[str]) -> Iterator[Conflict]:
        if self.mpi_mode:
            yield Conflict(("option.mpi_mode",), "engine=Python without option.mpi_mode; vLLM starts its own processes")
        yield from self.parser_conflicts()
        yield from self.drafting_conflicts()
        yield from self.unknown_to_vllm()
        if self.max_json_whitespace is not None and "structured_outputs_config" in self.passed_to_engine():
            yield Conflict(
                ("option.max_json_whitespace",),
                "only without option.structured_outputs_config, in which disable_any_whitespace is compact JSON",
            )
        if self.pipeline_parallel_degree != 1 and "option.rolling_batch" in given and self.rolling_batch == "vllm":
            yield Conflict(("option.pipeline_parallel_degree",), "1 with option.rolling_batch=vllm")

    @property
    def vllm_quantization(self) -> str | None:
        """Return the method by which weights are quantised, by vLLM's name."""
        return self.quantize

    def unknown_to_vllm(self) -> Iterator[Conflict]:
        """Yield the values that vLLM would refuse when it loads the model, as far as its version is known here."""
        if self.runs_elsewhere:
            return
        methods = engine_fields.literal(*QUANTIZATIONS)
        if self.vllm_quantization is not None and methods and self.vllm_quantization not in methods:
            key, asked = ("option.dtype", self.dtype) if self.quantize is None else ("option.quantize", self.quantize)
            found = f"what the installed vLLM has: {', '.join(sorted(methods))} in option.quantize"
            remedy = f"{asked} with option.rolling_batch=scheduler, or " if asked in _OF_SCHEDULER else ""
            yield Conflict((key,), f"{remedy}{found}")
        formats = engine_fields.literal(*_LOAD_FORMATS)
        if formats and self.load_format not in formats:
            yield Conflict(("option.load_format",), ", ".join(sorted(formats)))
        for name, text in self.passed_to_engine().items():
            instead = engine_fields.allowed_instead(name, text)
            if instead is not None:
                yield Conflict((f"option.{name}", name), instead)

    def drafting_conflicts(self) -> Iterator[Conflict]:
        """Yield two ways of naming a draft model."""
        if self.speculative_config is not None and self.speculative_draft_model is not None:
            yield Conflict(
                ("option.speculative_draft_model", "option.speculative_config"),
                "only without option.speculative_config, which sets the same",
            )

    @property
    def lets_model_choose_tools(self) -> bool:
        """Whether requests may leave it to the model to call a tool."""
        by_default = self.tool_call_parser == AUTO and "enable_auto_tool_choice" not in self.model_fields_set
        return self.enable_auto_tool_choice or by_default

    def parser_conflicts(self) -> Iterator[Conflict]:
        """Yield the options that require a parser, if none is named."""
        if self.enable_reasoning and self.reasoning_parser is None:
            yield Conflict(("option.enable_reasoning",), "true only with option.reasoning_parser")


class VllmOptions(VllmEngineOptions):
    """Keys of serving.properties for a model that vLLM runs to generate text."""

    rolling_batch: Annotated[Literal["auto", "vllm", "disable"], BeforeValidator(lower)] = "auto"
    """vLLM batches by itself with any of these values."""

    def warnings(self, given: Collection[str]) -> Iterator[Conflict]:
        if "option.task" in given and self.task is not None and self.task.lower() not in _GENERATING:
            yield Conflict(("option.task",), f"has no effect: vLLM serves {self.task} as text generation here")


class InWorkerOptions(VllmEngineOptions):
    """Keys of serving.properties for a model whose vLLM engine is always in the worker's own process."""

    engine_process: Annotated[Literal["worker"], BeforeValidator(lower)] = "worker"
    """Process of vLLM's engine."""
    compilation: Annotated[Literal["start"], BeforeValidator(lower)] = "start"
    """When vLLM compiles the model, unless enforce_eager is true."""


class VllmPoolingOptions(InWorkerOptions):
    """Keys of serving.properties for a model that vLLM runs to embed, score or classify texts."""

    rolling_batch: Annotated[
        Literal["disable"],
        BeforeValidator(lambda name: "disable" if lower(name) in ("auto", "vllm") else lower(name)),
        Allowed("auto, vllm or disable"),
    ] = "disable"
    """Requests run together as a dynamic batch (batch_size) with any of these values."""
    stop_sequence: Annotated[Texts, NoEffect("no text is generated"), NAMES_NOTHING] = Field(
        (), description=STOP_SEQUENCE_DESCRIPTION
    )
    speculative_draft_model: Annotated[str | None, NoEffect("no text is generated"), NAMES_DRAFT] = None
    """Model that drafts tokens for speculative decoding."""
    speculative_length: Annotated[PositiveInt, NoEffect("no text is generated")] = 5
    """Tokens that are drafted per step."""
    normalize: bool = True
    """Scale embeddings to length 1."""

    def engine_arguments(self) -> Mapping[str, Any]:
        return {**super().engine_arguments(), "runner": "pooling"}


def runs_pooling(workload: Workload) -> bool:
    """Return whether the pooling handler serves `workload`: a task that makes one vector or score of a text."""
    return workload.task in POOLING


_SAME_NAMES = (
    "max_model_len",
    "load_format",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enable_expert_parallel",
    "disable_sliding_window",
    "max_logprobs",
    "tokenizer_mode",
    "reasoning_parser",
)
_JSON_TEXTS = ("limit_mm_per_prompt", "kv_transfer_config", "speculative_config")


# Where vLLM's source lists the values of an option: the file, and the name of a Literal in it.
QUANTIZATIONS = ("model_executor/layers/quantization/__init__.py", "QuantizationMethods")
_OF_SCHEDULER = (*QUANTIZATION, *BLOCK_FORMATS)  # int8 may also be that of option.dtype
_LOAD_FORMATS = ("model_executor/model_loader/__init__.py", "LoadFormats")
