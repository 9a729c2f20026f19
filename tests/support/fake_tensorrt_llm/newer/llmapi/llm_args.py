"""The arguments of the class LLM in a version without engines of TensorRT."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field
from tensorrt_llm.llmapi.strict import StrictBaseModel
from tensorrt_llm.lora_helper import LoraConfig


class QuantAlgo(StrEnum):
    W8A16 = "W8A16"
    W4A16 = "W4A16"
    W4A16_AWQ = "W4A16_AWQ"
    W4A8_AWQ = "W4A8_AWQ"
    W4A16_GPTQ = "W4A16_GPTQ"
    W8A8_SQ_PER_CHANNEL = "W8A8_SQ_PER_CHANNEL"
    W8A8_SQ_PER_TENSOR_PLUGIN = "W8A8_SQ_PER_TENSOR_PLUGIN"
    W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN = "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"
    W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN = "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN"
    W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN = "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN"
    FP8 = "FP8"
    INT8 = "INT8"
    NVFP4 = "NVFP4"


class KvCacheConfig(StrictBaseModel):
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = Field(0.9, ge=0, le=1)
    host_cache_size: int | None = None
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: int = Field(0, ge=0)
    dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    tokens_per_block: int = 32
    disk_cache_size: int | None = None
    disk_cache_path: str | None = None
    kv_events_config: Any = None
    iteration_stats_interval: int | None = None
    use_kv_cache_manager_v2: Any = "auto"


class SchedulerConfig(StrictBaseModel):
    capacity_scheduler_policy: Literal["MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"] = "GUARANTEED_NO_EVICT"
    context_chunking_policy: Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"] | None = None
    dynamic_batch_config: Any = None
    waiting_queue_policy: str = "FCFS"
    use_python_scheduler: bool = False
    enable_prefix_aware_scheduling: bool = True


class CudaGraphConfig(StrictBaseModel):
    batch_sizes: list[int] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False


class MoeConfig(StrictBaseModel):
    backend: str = "CUTLASS"


class CalibConfig(StrictBaseModel):
    device: Literal["cuda", "cpu"] = "cuda"
    calib_dataset: str = "cnn_dailymail"
    calib_batches: int = 512
    calib_batch_size: int = 1
    calib_max_seq_length: int = 512
    random_seed: int = 1234
    tokenizer_max_seq_length: int = 2048


class ExtendedRuntimePerfKnobConfig(StrictBaseModel):
    multi_block_mode: bool = True
    enable_context_fmha_fp32_acc: bool = False
    cuda_graph_mode: bool = False
    cuda_graph_cache_size: int = 0


class QuantConfig(StrictBaseModel):
    quant_algo: QuantAlgo | None = None
    kv_cache_quant_algo: QuantAlgo | None = None
    group_size: int = 128
    smoothquant_val: float = 0.5
    clamp_val: list[float] | None = None
    use_meta_recipe: bool = False
    has_zero_point: bool = False
    pre_quant_scale: bool = False
    exclude_modules: list[str] | None = None
    mamba_ssm_cache_dtype: str | None = None


class BaseLlmArgs(StrictBaseModel):
    model: Any
    tokenizer: Any = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    gpus_per_node: int | None = None
    moe_cluster_parallel_size: int | None = None
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    enable_attention_dp: bool = False
    enable_lm_head_tp_in_adp: bool = False
    cp_config: dict[str, Any] | None = Field(default_factory=dict)
    load_format: Literal["auto", "dummy"] = "auto"
    fail_fast_on_attention_window_too_large: bool = False
    enable_lora: bool = False
    lora_config: LoraConfig | None = None
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    enable_chunked_prefill: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    batched_logits_processor: Any = None
    iter_stats_max_iterations: int | None = None
    request_stats_max_iterations: int | None = None
    peft_cache_config: Any = None
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    cache_transceiver_config: Any = None
    sparse_attention_config: Any = None
    speculative_config: Any = None
    max_batch_size: int | None = 2048
    max_input_len: int | None = 1024
    max_seq_len: int | None = None
    max_beam_width: int | None = 1
    max_num_tokens: int | None = 8192
    gather_generation_logits: bool = False
    num_postprocess_workers: int = 0
    postprocess_tokenizer_dir: str | None = None
    reasoning_parser: str | None = None
    decoding_config: Any = None
    mpi_session: Any = None
    backend: str | None = None
    return_perf_metrics: bool = False
    orchestrator_type: Literal["rpc", "ray"] | None = None


class TorchLlmArgs(BaseLlmArgs):
    garbage_collection_gen0_threshold: int = 20000
    cuda_graph_config: CudaGraphConfig | None = Field(default_factory=CudaGraphConfig)
    attention_dp_config: Any = None
    disable_overlap_scheduler: bool = False
    moe_config: MoeConfig = Field(default_factory=MoeConfig)
    attn_backend: str = "TRTLLM"
    sampler_type: str = "auto"
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: bool = False
    print_iter_log: bool = False
    perf_metrics_max_requests: int = 0
    batch_wait_timeout_ms: float = 0
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0
    torch_compile_config: Any = None
    enable_autotuner: bool = True
    enable_layerwise_nvtx_marker: bool = False
    load_format: Literal["auto", "dummy", "vision_only"] = "auto"
    enable_min_latency: bool = False
    stream_interval: int = 1
    force_dynamic_quantization: bool = False
    allreduce_strategy: Literal[
        "AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC"
    ] = "AUTO"
    checkpoint_loader: Any = None
    checkpoint_format: str | None = None
    kv_connector_config: Any = None
    mm_encoder_only: bool = False
    ray_worker_extension_cls: str | None = None
    custom_tokenizer: str | None = None
    post_processor_hook: Any = None
    model_kwargs: dict[str, Any] | None = None
    pp_partition: list[int] | None = None
