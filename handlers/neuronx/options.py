"""The options of the transformers_neuronx handler; importable without Neuron's libraries."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from lmi_server.configuration.declaration import Allowed, Conflict, Documented, Key
from lmi_server.configuration.options import ModelOptions, ParallelDegree, PositiveInt, lower, short_dtype

NeuronDtype = Annotated[
    Literal["fp32", "fp16", "bf16"],
    BeforeValidator(short_dtype),
    Allowed("fp32 (float32), fp16 (float16), bf16 (bfloat16)"),
]
Lengths = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    BeforeValidator(lambda value: tuple(value.split(",")) if isinstance(value, str) else value),
    Allowed("integers of 1 or more, separated by commas"),
]

_LOADER_OF_TNX = (
    "fuse_qkv",
    "collectives_layout",
    "on_device_embedding",
    "load_in_8bit",
    "quantize",
    "load_split_model",
    "compiled_graph_path",
    "context_length_estimate",
)


def _graph_path(text: str | None) -> str | None:
    if text is not None and not text.startswith("s3://") and not os.path.isdir(text):
        raise ValueError("no such directory")
    return text


class NeuronxOptions(ModelOptions):
    """Keys of serving.properties for a model on AWS Inferentia and Trainium."""

    tensor_parallel_degree: ParallelDegree = Field(1, description="Neuron cores that one model is split over.")
    rolling_batch: Annotated[Literal["auto", "disable"], BeforeValidator(lower)] = Field(
        "disable", description="Iteration-level batching with max_rolling_batch_size slots."
    )
    dtype: Annotated[NeuronDtype, Key(also=("option.data_type",))] = Field(
        "fp16", description="Data type of weights and KV cache."
    )
    task: str | None = Field(
        None, description="Task of the model by its Hugging Face name; without it the model's files determine the task."
    )
    n_positions: PositiveInt = Field(128, description="Maximum number of tokens of prompt and output together.")
    load_in_8bit: bool = Field(False, description="Quantise the weights to 8 bits.")
    unroll: Annotated[str | None, Field(pattern=r"^[1-9]\d*$"), Allowed("an integer of 1 or more")] = Field(
        None, description="Number of layers per compiled graph; without it the compiler chooses."
    )
    neuron_optimize_level: Annotated[
        Literal["1", "2", "3"] | None, Documented("2", "none; the compiler then uses 2")
    ] = Field(None, description="Optimisation level of the compiler; a higher one compiles longer and runs faster.")
    context_length_estimate: Lengths | None = Field(None, description="Prompt lengths for which graphs are compiled.")
    low_cpu_mem_usage: bool = Field(
        False, description="Load weights one by one instead of taking twice the model's memory."
    )
    load_split_model: bool = Field(False, description="The checkpoint has been split for Neuron.")
    compiled_graph_path: Annotated[
        str | None, AfterValidator(_graph_path), Allowed("s3://bucket/prefix, or a directory that exists")
    ] = Field(None, description="Directory or s3:// address of the compiled graph.")
    group_query_attention: (
        Literal["shard-over-heads", "shard-over-batch", "replicated-heads", "all-gather-heads"] | None
    ) = Field(None, description="How to split the KV cache of grouped-query attention.")
    enable_mixed_precision_accumulation: Annotated[
        bool, Documented(None, "without the key it is false; LMI's code treats even false as true")
    ] = Field(False, description="Accumulate in fp32.")
    enable_saturate_infinity: bool = Field(False, description="Replace infinities by the largest finite number.")
    quantize: Literal["static_int8"] | None = Field(
        None, description="Quantisation of the weights; same as load_in_8bit."
    )
    save_mp_checkpoint_path: str | None = Field(
        None, description="Directory to which the model is written, split by core."
    )
    model_loader: Literal["tnx", "optimum"] | None = Field(None, description="Library that loads the model.")
    rolling_batch_strategy: Literal["continuous_batching", "naive_rolling_batch"] | None = Field(
        None, description="How a new request joins the batch; without it continuous_batching for Llama and Mistral."
    )
    fuse_qkv: bool = Field(False, description="Compute queries, keys and values in one operation.")
    on_device_embedding: bool = Field(False, description="Look embeddings up on the device.")
    collectives_layout: Literal["BSH", "HSB", "SBH"] | None = Field(
        None, description="Layout of collective operations."
    )
    partition_schema: Literal["legacy", "optimum", "safetensors", "compile_only"] | None = Field(
        None, description="Format in which a compiled model is saved."
    )
    draft_model_compiled_path: str | None = Field(None, description="Compiled graph of the draft model.")
    speculative_draft_model: str | None = Field(None, description="Model that drafts tokens for speculative decoding.")
    speculative_length: PositiveInt = Field(5, description="Number of tokens that the draft model proposes.")
    draft_model_tp_size: PositiveInt | None = Field(None, description="Neuron cores of the draft model.")
    fuse_mlp: bool = Field(False, description="Fuse the MLP.")
    fused_rmsnorm_qkv: bool = Field(False, description="Fuse the norm with queries, keys and values.")
    qkv_tiling: bool = Field(False, description="Tile the weights of queries, keys and values.")
    weight_tiling: bool = Field(False, description="Tile the weights of the MLP.")
    mlp_out_weight_transpose: bool = Field(False, description="Transpose the output weights of the MLP.")
    attention_layout: Literal["HSB", "BSH", "SBH"] | None = Field(None, description="Layout of attention.")
    cache_layout: Literal["SBH", "BSH"] | None = Field(None, description="Layout of the KV cache.")
    all_reduce_dtype: Literal["float32", "float16", "bfloat16"] | None = Field(
        None, description="Data type of all-reduce."
    )
    cast_logits_dtype: Literal["float32", "float16", "bfloat16"] | None = Field(
        None, description="Data type of logits."
    )
    sequence_parallel_norm_threshold: PositiveInt | None = Field(
        None, description="Number of tokens from which norms use sequence parallelism."
    )
    on_device_generation: bool = Field(False, description="Sample on the device.")
    shard_over_sequence: bool = Field(False, description="Split the KV cache along the sequence.")
    compilation_worker_count: PositiveInt | None = Field(None, description="Number of processes that compile.")
    sequence_parallel: bool = Field(False, description="Use sequence parallelism.")
    multi_node: bool = Field(False, description="Spread the model over several machines.")
    neuron_cc_pipeline_factor: PositiveInt | None = Field(None, description="Pipeline factor of the compiler.")
    neuron_quant: bool = Field(False, description="Quantise with optimum-neuron.")
    use_stable_diffusion: bool = Field(False, description="The model is a stable-diffusion pipeline.")
    height: PositiveInt = Field(512, description="Height of images in pixels.")
    width: PositiveInt = Field(512, description="Width of images in pixels.")
    num_images_per_prompt: PositiveInt = Field(1, description="Number of images for each prompt.")
    use_auth_token: str | None = Field(None, description="Token for gated models of Hugging Face.")

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return the arguments of `NeuronAutoModelForCausalLM.from_pretrained`."""
        arguments = {
            "pretrained_model_name_or_path": self.model_id,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            "amp": {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}[self.dtype],
            "tp_degree": self.tensor_parallel_degree,
            "n_positions": self.n_positions,
            "unroll": self.unroll,
            "context_length_estimate": self.context_length_estimate,
            "low_cpu_mem_usage": self.low_cpu_mem_usage or None,
            "batch_size": 1 if self.rolling_batch == "disable" else self.max_rolling_batch_size,
            "quant_dtype": "s8" if self.load_in_8bit or self.quantize else None,
            "group_query_attention": self.group_query_attention,
            "fuse_qkv": self.fuse_qkv or None,
            "on_device_embedding": self.on_device_embedding or None,
            "collectives_layout": self.collectives_layout,
        }
        return {name: value for name, value in arguments.items() if value is not None}

    def context_length(self) -> int | None:
        return self.n_positions

    def conflicts(self, given: Collection[str]) -> Iterator[Conflict]:
        key = ("option.partition_schema",)
        if self._loader(given) == "tnx" and self.partition_schema == "optimum":
            yield Conflict(key, "optimum only with option.model_loader=optimum")
        if self.model_loader == "optimum" and self.partition_schema not in (None, "optimum"):
            yield Conflict(key, "optimum with option.model_loader=optimum")

    def _loader(self, given: Collection[str]) -> str | None:
        needs_tnx = any(f"option.{name}" in given for name in _LOADER_OF_TNX)
        return self.model_loader or ("tnx" if needs_tnx else None)
