"""The options of the LMI-Dist handler."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from handlers.paged_attention_options import PagedAttentionOptions
from lmi_server.configuration.declaration import Deprecated, DeprecatedValue, Documented, Finding
from lmi_server.configuration.options import NonNegativeFloat, PositiveInt, lower

Quantize = Annotated[
    Literal["bitsandbytes8", "gptq", "awq", "squeezellm"],
    BeforeValidator(lambda method: "bitsandbytes8" if method == "bitsandbytes" else method),
]


class LmiDistOptions(PagedAttentionOptions):
    """Keys of serving.properties for a model that LMI-Dist runs under the MPI engine."""

    rolling_batch: Annotated[Literal["auto", "lmi-dist"], BeforeValidator(lower)] = Field(
        "auto", description="LMI-Dist batches by itself, whatever this says."
    )
    quantize: Annotated[Quantize | None, DeprecatedValue("bitsandbytes", "use bitsandbytes8")] = Field(
        None, description="Quantisation of the weights; all but bitsandbytes8 need a checkpoint made with it."
    )
    max_rolling_batch_prefill_tokens: Annotated[
        PositiveInt | None,
        Deprecated("the best value is computed from the machine"),
        Documented("1088", "deprecated since 0.25.0, when LMI began to compute it"),
    ] = Field(None, description="Prompt tokens that one step computes at most.")
    speculative_draft_model: str | None = Field(None, description="Model that drafts tokens for speculative decoding.")
    speculative_length: PositiveInt = Field(5, description="Tokens that the draft model proposes.")
    speculative_telemetry: bool = Field(True, description="Log how many drafted tokens were accepted.")
    draft_model_tp_size: PositiveInt = Field(1, description="GPUs that the draft model is split over.")
    record_acceptance_rate: bool = Field(False, description="Log the rate at which drafted tokens are accepted.")
    fully_sharded_loras: bool = Field(False, description="Shard LoRA computations fully.")
    long_lora_scaling_factors: str | None = Field(None, description="Scaling factors of long-context LoRA adapters.")
    lora_dtype: str = Field("auto", description="Data type of LoRA weights.")
    max_logprobs: PositiveInt = Field(20, description="Log probabilities per token that a request may ask for.")
    enable_chunked_prefill: bool | None = Field(None, description="Compute long prompts in chunks beside decoding.")
    cpu_offload_gb_per_gpu: NonNegativeFloat = Field(
        0.0, description="GiB of weights per GPU that stay in main memory."
    )
    enable_prefix_caching: bool = Field(False, description="Keep the KV cache of shared beginnings of prompts.")
    disable_sliding_window: bool = Field(False, description="Attend to the whole context.")
    limit_mm_per_prompt: str | None = Field(None, description="Images and such per prompt, image=2.")
    tokenizer_mode: str = Field("auto", description="Kind of tokenizer: auto, slow, mistral.")

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return the arguments of LMI-Dist's engine that this configuration decides."""
        arguments = {
            "model": self.model_id,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            "dtype": self.dtype,
            "tensor_parallel_size": self.tensor_parallel_degree,
            "max_num_seqs": self.max_rolling_batch_size,
            "max_num_batched_tokens": self.max_rolling_batch_prefill_tokens,
            "quantization": self.quantize,
            "load_format": self.load_format,
            "max_model_len": self.max_model_len,
            "enforce_eager": self.enforce_eager,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "draft_model": self.speculative_draft_model,
        }
        return {name: value for name, value in arguments.items() if value is not None}

    def contradictions(self, given: Collection[str]) -> Iterator[Finding]:
        if not self.mpi_mode:
            yield Finding(("option.mpi_mode", "option.rolling_batch"), "lmi-dist only with engine=MPI")
        if self.enable_lora and self.speculative_draft_model is not None:
            yield Finding(
                ("option.enable_lora", "option.speculative_draft_model"),
                "true only without option.speculative_draft_model",
            )
