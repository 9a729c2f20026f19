"""The configurations of transformers-neuronx, with its arguments, its defaults and what it refuses."""

from __future__ import annotations

import enum
from typing import Any

_DTYPES = ("float32", "float16", "bfloat16")


class Layout(enum.Enum):
    HSB = "HSB"
    BSH = "BSH"
    SBH = "SBH"


class GQA(enum.Enum):
    SHARD_OVER_HEADS = "shard-over-heads"
    SHARD_OVER_BATCH = "shard-over-batch"
    REPLICATED_HEADS = "replicated-heads"
    ALL_GATHER_HEADS = "all-gather-heads"


class QuantizationConfig:
    def __init__(
        self,
        quant_dtype: str = "s8",
        dequant_dtype: str = "f16",
        quantize_method: str = "vector_dynamic",
        quantize_attn: bool = True,
        no_quantize_list: Any = (),
    ) -> None:
        if quant_dtype not in ("s8", "f8e4m3fn"):
            raise NotImplementedError(f"{quant_dtype} is not implemented.")
        self.quant_dtype, self.dequant_dtype = quant_dtype, dequant_dtype
        self.quantize_method, self.quantize_attn = quantize_method, quantize_attn


class ContinuousBatchingConfig:
    def __init__(self, **kwargs: Any) -> None:
        asked = kwargs.pop("max_num_seqs", None)
        self.max_num_seqs = asked if asked is not None else kwargs.pop("batch_size_for_shared_caches")
        self.max_model_len = kwargs.pop("max_model_len", None)
        assert len(kwargs) == 0, f"unexpected key word arguments: {kwargs.keys()}"

    @property
    def batch_size_for_shared_caches(self) -> int:
        return int(self.max_num_seqs)


class GenerationConfig:
    def __init__(self, *, max_length: Any = None, do_sample: bool = False, top_k: int = 50, top_p: float = 1.0) -> None:
        self.max_length, self.do_sample, self.top_k, self.top_p = max_length, do_sample, top_k, top_p


class NeuronConfig:
    def __init__(
        self,
        *,
        sparse_attn: Any = None,
        quant: QuantizationConfig | None = None,
        kv_cache_quant: Any = None,
        continuous_batching: ContinuousBatchingConfig | None = None,
        attention_layout: Any = "HSB",
        collectives_layout: Any = "HSB",
        cache_layout: Any = "SBH",
        padding_side: str = "left",
        group_query_attention: Any = None,
        sequence_parallel_norm: bool = False,
        sequence_parallel_norm_threshold: int = 2048,
        bf16_rms_norm: bool = False,
        on_device_embedding: bool = False,
        on_device_generation: GenerationConfig | None = None,
        all_reduce_dtype: str | None = None,
        cast_logits_dtype: str = "float32",
        fuse_qkv: bool = False,
        qkv_tiling: bool = False,
        weight_tiling: bool = False,
        log_softmax_scores: bool = False,
        shard_over_sequence: bool = False,
        output_all_logits: bool = False,
        attn_output_transposed: bool = False,
        fused_rmsnorm_qkv: bool = False,
        fused_rmsnorm_mlp: bool = False,
        mlp_out_weight_transpose: bool = False,
        fuse_mlp: bool = False,
        compilation_worker_count: int | None = None,
        duplicate_q_weight_sos: bool = False,
        **kwargs: Any,
    ) -> None:
        assert cast_logits_dtype in _DTYPES, f"The `cast_logits_dtype={cast_logits_dtype}` argument must be one of ..."
        assert not kwargs, f"Unexpected NeuronConfig keyword arguments: {kwargs}"
        assert not qkv_tiling or fuse_qkv, "QKV weight tiling is currently only supported when QKV fusion is enabled."
        self.quant, self.continuous_batching, self.on_device_generation = quant, continuous_batching, None
        self.attention_layout = Layout(attention_layout).value
        self.collectives_layout, self.cache_layout = Layout(collectives_layout).value, Layout(cache_layout).value
        assert not shard_over_sequence or self.cache_layout == "SBH", "flash decoding only support SBH layout"
        self.group_query_attention = None if group_query_attention is None else GQA(group_query_attention).value
        self.padding_side = "right" if continuous_batching else padding_side
        self.sequence_parallel_norm = sequence_parallel_norm
        self.sequence_parallel_norm_threshold = sequence_parallel_norm_threshold
        self.on_device_embedding, self.all_reduce_dtype = on_device_embedding, all_reduce_dtype
        self.cast_logits_dtype, self.fuse_qkv, self.qkv_tiling = cast_logits_dtype, fuse_qkv, qkv_tiling
        self.weight_tiling, self.shard_over_sequence = weight_tiling, shard_over_sequence
        self.fused_rmsnorm_qkv, self.mlp_out_weight_transpose = fused_rmsnorm_qkv, mlp_out_weight_transpose
        self.fuse_mlp, self.compilation_worker_count = fuse_mlp, compilation_worker_count
