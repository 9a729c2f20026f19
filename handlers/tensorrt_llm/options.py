"""The options of the tensorrt_llm handler; importable without TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from lmi_server.configuration.declaration import Allowed, Conflict, Documented, Key
from lmi_server.configuration.options import (
    DTYPE_NOTE,
    FloatDtype,
    Fraction,
    JsonObject,
    NonNegativeInt,
    ParallelDegree,
    PositiveInt,
    Share,
    lower,
    without_effect,
)
from lmi_server.configuration.options import ModelOptions as _ModelOptions

_SMOOTHQUANT = ("smoothquant_alpha", "smoothquant_per_token", "smoothquant_per_channel", "multi_query_mode")
_AWQ = ("awq_format", "awq_calib_size")


def _window_sizes(value: str) -> str:
    sizes = value.strip("[] ").split(",")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError("not a list of positive integers")
    return value


class TensorRtLlmOptions(_ModelOptions):
    """Keys of serving.properties for a model that TensorRT-LLM runs under the MPI engine."""

    tensor_parallel_degree: Annotated[ParallelDegree, Key(also=("option.tensor_parallel_size",))] = Field(
        "max", description="GPUs that one model is split over; max is all GPUs of the machine."
    )
    pipeline_parallel_degree: Annotated[PositiveInt, Key(also=("option.pipeline_parallel_size",))] = Field(
        1, description="Stages that the layers of one model are split into, each on its own devices."
    )
    rolling_batch: Annotated[Literal["auto", "trtllm", "disable"], BeforeValidator(lower)] = Field(
        "trtllm", description="TensorRT-LLM batches by itself; disable is for T5 models."
    )
    dtype: Annotated[FloatDtype, Key(also=("option.data_type",)), DTYPE_NOTE] = Field(
        "auto", description="Data type of weights and KV cache; auto is that of the checkpoint."
    )
    quantize: Literal["smoothquant", "awq", "fp8"] | None = Field(
        None, description="Quantisation of the weights while the engine is compiled."
    )
    max_input_len: PositiveInt = Field(1024, description="Maximum number of prompt tokens; compiled into the engine.")
    max_output_len: PositiveInt = Field(512, description="Maximum number of output tokens; compiled into the engine.")
    use_custom_all_reduce: bool = Field(False, description="Use the all-reduce kernel for GPUs with NVLink.")
    tokens_per_block: PositiveInt = Field(64, description="Tokens in one block of the paged KV cache.")
    batch_scheduler_policy: Literal["max_utilization", "guaranteed_no_evict"] = Field(
        "max_utilization", description="Whether to admit requests that may have to be evicted later."
    )
    kv_cache_free_gpu_mem_fraction: Annotated[Share, Key(also=("option.free_gpu_memory_fraction",))] = Field(
        0.95, description="Share of the GPU memory that the weights leave free for the KV cache."
    )
    max_num_sequences: Annotated[
        PositiveInt | None,
        Documented(
            "the batch size set while building Tensorrt engine",
            "equivalent: without the key the engine uses its own batch size",
        ),
    ] = Field(None, description="Maximum number of requests in a batch; without it option.max_rolling_batch_size.")
    enable_trt_overlap: bool = Field(False, description="Overlap the execution of batches.")
    enable_kv_cache_reuse: Annotated[bool, Key(also=("option.enable_block_reuse",))] = Field(
        False, description="Reuse the KV cache of prompt prefixes that requests share."
    )
    baichuan_model_version: Literal["v1_7b", "v1_13b", "v2_7b", "v2_13b"] = Field(
        "v1_13b", description="Version of a Baichuan model."
    )
    chatglm_model_version: Literal[
        "unspecified",
        "chatglm_6b",
        "chatglm2_6b",
        "chatglm2_6b_32k",
        "chatglm3_6b",
        "chatglm3_6b_base",
        "chatglm3_6b_32k",
        "glm_10b",
    ] = Field("unspecified", description="Version of a ChatGLM model; such a model requires it.")
    gpt_model_version: Literal["gpt2", "santacoder", "starcoder"] = Field(
        "gpt2", description="Variant of a GPT-2 model."
    )
    multi_block_mode: bool = Field(False, description="Split long KV sequences into blocks; not for Qwen.")
    use_fused_mlp: bool = Field(False, description="Fuse the gated MLP; for Llama only.")
    rotary_base: Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("a number above 0")] = Field(
        10000.0, description="Base of the rotary embedding; for Llama, InternLM and Qwen."
    )
    rotary_dim: PositiveInt = Field(64, description="Dimensions of the rotary embedding; for GPT-J only.")
    rotary_scaling_type: Literal["linear", "dynamic"] | None = Field(
        None, description="Scaling of the rotary embedding; requires rotary_scaling_factor."
    )
    rotary_scaling_factor: Annotated[float, Field(gt=1, allow_inf_nan=False), Allowed("a number above 1")] | None = (
        Field(None, description="Factor of rotary_scaling_type, which it requires.")
    )
    smoothquant_alpha: Fraction = Field(
        0.8, description="Share of the outliers that smoothquant moves into the weights."
    )
    smoothquant_per_token: bool = Field(False, description="One smoothquant scaling factor for each token.")
    smoothquant_per_channel: bool = Field(False, description="One smoothquant scaling factor for each channel.")
    multi_query_mode: bool = Field(False, description="The model has multi-query attention; for smoothquant.")
    awq_format: Annotated[Literal["int4_awq"], Key(also=("option.q_format",))] = Field(
        "int4_awq", description="Format of AWQ weights."
    )
    awq_calib_size: PositiveInt = Field(32, description="Number of samples that calibrate AWQ.")
    awq_block_size: PositiveInt = Field(128, description="Group size of AWQ.")
    calib_size: PositiveInt = Field(512, description="Number of samples for calibration.")
    calib_batch_size: PositiveInt = Field(32, description="Number of samples per batch of the calibration.")
    max_num_tokens: PositiveInt = Field(16384, description="Maximum number of tokens that one step computes.")
    max_draft_len: PositiveInt | None = Field(None, description="Maximum number of tokens that a draft model proposes.")
    logits_dtype: Literal["fp32", "fp16"] = Field("fp32", description="Data type of logits.")
    trtllm_checkpoint_path: str | None = Field(None, description="Checkpoint that has been converted for TensorRT-LLM.")
    num_checkpoint_workers: PositiveInt | None = Field(None, description="Processes that convert the checkpoint.")
    num_engine_workers: PositiveInt | None = Field(None, description="Processes that compile the engine.")
    load_by_shard: bool = Field(False, description="Convert the checkpoint file by file.")
    use_fp8_context_fmha: bool = Field(False, description="Compute attention in fp8 during prefill.")
    backend: str | None = Field(None, description="Engine behind TensorRT-LLM's API: pytorch, or compiled.")
    tokenizer: str | None = Field(None, description="Tokenizer to use instead of the model's.")
    tokenizer_mode: Literal["auto", "slow"] = Field("auto", description="Kind of tokenizer.")
    skip_tokenizer_init: bool = Field(False, description="Accept and return token ids only.")
    tokenizer_revision: str | None = Field(None, description="Branch, tag or commit of the tokenizer.")
    context_parallel_size: PositiveInt = Field(1, description="GPUs that one context is split over.")
    moe_tensor_parallel_size: PositiveInt | None = Field(None, description="GPUs that each expert is split over.")
    moe_expert_parallel_size: PositiveInt | None = Field(
        None, description="GPUs that the experts are distributed over."
    )
    enable_attention_dp: bool = Field(False, description="Use data parallelism in attention.")
    auto_parallel: bool = Field(False, description="Let TensorRT-LLM choose the parallelism.")
    auto_parallel_world_size: PositiveInt | None = Field(None, description="GPUs for auto_parallel.")
    load_format: str = Field("auto", description="Format of the checkpoint: auto, or dummy.")
    enable_chunked_prefill: bool = Field(
        False, description="Compute long prompts in chunks, in the same steps as decoding."
    )
    guided_decoding_backend: str | None = Field(
        None, description="Library that enforces JSON schemas and grammars: xgrammar."
    )
    iter_stats_max_iterations: NonNegativeInt | None = Field(
        None, description="Number of steps for which statistics are kept."
    )
    request_stats_max_iterations: NonNegativeInt | None = Field(
        None, description="Number of steps for which statistics per request are kept."
    )
    embedding_parallel_mode: str = Field("SHARDING_ALONG_VOCAB", description="How embeddings are split.")
    fast_build: bool = Field(False, description="Compile the engine faster; it then runs slower.")
    enable_build_cache: bool = Field(True, description="Keep compiled engines for later starts.")
    batching_type: str | None = Field(None, description="Kind of batching of the executor.")
    normalize_log_probs: bool = Field(False, description="Normalise log probabilities.")
    gather_generation_logits: bool = Field(False, description="Keep the logits of generated tokens.")
    extended_runtime_perf_knob_config: JsonObject | None = Field(None, description="Further settings of the runtime.")
    max_batch_size: PositiveInt | None = Field(
        None, description="Maximum number of requests; compiled into the engine."
    )
    max_seq_len: PositiveInt | None = Field(None, description="Maximum number of tokens of prompt and output together.")
    max_beam_width: PositiveInt = Field(1, description="Maximum number of beams.")
    max_tokens: PositiveInt | None = Field(None, description="Maximum number of tokens in the KV cache.")
    max_attention_window: (
        Annotated[str, AfterValidator(_window_sizes), Allowed("integers separated by commas")] | None
    ) = Field(None, description="Maximum number of tokens that each layer attends to.")
    sink_token_length: PositiveInt | None = Field(
        None, description="Number of first tokens that always stay in the KV cache."
    )
    host_cache_size: NonNegativeInt | None = Field(None, description="Bytes of main memory for the KV cache.")
    onboard_blocks: bool = Field(True, description="Copy offloaded KV-cache blocks back to the GPU before use.")
    cross_kv_cache_fraction: Fraction | None = Field(None, description="Share of the KV cache for cross attention.")
    secondary_offload_min_priority: NonNegativeInt | None = Field(
        None, description="Minimum priority of blocks that are offloaded."
    )
    event_buffer_max_size: NonNegativeInt = Field(0, description="Maximum number of KV-cache events that are kept.")
    enable_overlap_scheduler: bool = Field(False, description="Schedule a step while the previous one runs.")
    kv_cache_dtype: str | None = Field(None, description="Data type of the KV cache, for example fp8.")
    attn_backend: str = Field("TRTLLM", description="Implementation of attention.")
    use_cuda_graph: bool = Field(False, description="Capture decoding as a CUDA graph.")
    moe_backend: str = Field("CUTLASS", description="Implementation of mixtures of experts.")
    save_mp_checkpoint_path: str | None = Field(None, description="Where to write the compiled engine.")
    quant_algo: str | None = Field(None, description="Quantisation of the weights, by its name in TensorRT-LLM.")
    kv_cache_quant_algo: str | None = Field(
        None, description="Quantisation of the KV cache, by its name in TensorRT-LLM."
    )
    group_size: PositiveInt | None = Field(None, description="Group size of the quantisation.")
    smoothquant_val: Fraction | None = Field(
        None, description="Same as smoothquant_alpha, by its name in TensorRT-LLM."
    )
    clamp_val: str | None = Field(None, description="Bounds to which activations are clamped.")
    use_meta_recipe: bool = Field(False, description="Quantise to fp8 by Meta's recipe for Llama.")
    has_zero_point: bool = Field(False, description="Quantised weights have zero points.")
    pre_quant_scales: bool = Field(
        False, description="Quantised weights have scales that were applied before quantisation."
    )
    exclude_modules: str | None = Field(None, description="Modules that stay unquantised, separated by commas.")
    device: str = Field("cuda", description="Device of the calibration.")
    calib_dataset: str = Field("cnn_dailymail", description="Data set of the calibration.")
    calib_batches: PositiveInt = Field(512, description="Number of batches of the calibration.")
    calib_max_seq_length: PositiveInt = Field(512, description="Maximum number of tokens of a calibration sample.")
    random_seed: NonNegativeInt = Field(1234, description="Seed of the calibration.")
    tokenizer_max_seq_length: PositiveInt = Field(
        2048, description="Maximum number of tokens that the tokenizer produces for the calibration."
    )

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return the arguments of TensorRT-LLM's toolkit: the model, and every option that differs from its default."""
        general = type(self).model_fields.keys() - _ModelOptions.model_fields.keys()
        changed = {
            name: value for name, value in self if name in general and value != type(self).model_fields[name].default
        }
        return {
            "model_id_or_path": self.model_id,
            "tensor_parallel_degree": self.tensor_parallel_degree,
            "dtype": self.dtype,
            "max_input_len": self.max_input_len,
            "max_output_len": self.max_output_len,
            "max_num_sequences": self.max_num_sequences or self.max_rolling_batch_size,
            **changed,
        }

    def context_length(self) -> int | None:
        return self.max_seq_len or self.max_input_len + self.max_output_len

    def conflicts(self, given: Collection[str]) -> Iterator[Conflict]:
        pair = ("option.rotary_scaling_type", "option.rotary_scaling_factor")
        if (self.rotary_scaling_type is None) != (self.rotary_scaling_factor is None):
            yield Conflict(pair, "rotary_scaling_type and rotary_scaling_factor only together")
        if self.rolling_batch != "disable" and not self.mpi_mode:
            yield Conflict(("option.mpi_mode", "option.rolling_batch"), "trtllm only with engine=MPI")

    def warnings(self, given: Collection[str]) -> Iterator[Conflict]:
        if self.quantize != "smoothquant":
            keys = [f"option.{name}" for name in _SMOOTHQUANT]
            yield from without_effect(given, "option.quantize=smoothquant", keys)
        if self.quantize != "awq":
            yield from without_effect(given, "option.quantize=awq", [f"option.{name}" for name in _AWQ])
