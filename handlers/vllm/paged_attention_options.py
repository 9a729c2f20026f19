"""Options that the handlers with paged attention of their own (vLLM, LMI-Dist) share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lmi_server.configuration.declaration import Key
from lmi_server.configuration.options import ModelOptions, PositiveInt, Share


class PagedAttentionOptions(ModelOptions):
    """Keys of serving.properties for an engine that schedules by itself over a paged KV cache."""

    max_rolling_batch_size: Annotated[PositiveInt, Key(also=("option.max_num_seqs",), must_agree=True)] = Field(
        32, description="Requests that the engine decodes together."
    )
    load_format: str = Field("auto", description="Format of the checkpoint; auto takes safetensors, then bin files.")
    max_model_len: PositiveInt | None = Field(
        None, description="Tokens of prompt and output together; without it what config.json allows."
    )
    enforce_eager: bool = Field(False, description="Run without CUDA graphs: slower, some GB of GPU memory less.")
    gpu_memory_utilization: Share = Field(
        0.9, description="Share of GPU memory for weights, activations and KV cache together."
    )
    max_loras: PositiveInt = Field(4, description="LoRA adapters in one batch.")
    max_lora_rank: PositiveInt = Field(16, description="Highest rank of a LoRA adapter.")
    lora_extra_vocab_size: PositiveInt = Field(256, description="Tokens that a LoRA adapter may add.")
    max_cpu_loras: PositiveInt | None = Field(None, description="LoRA adapters that are kept in main memory.")

    def context_length(self) -> int | None:
        return self.max_model_len
