"""The options of the huggingface handler; importable without its engine, so that the server can check them at start."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lmi_server.configuration.declaration import Allowed, Deprecated, NoEffect, Unavailable
from lmi_server.configuration.options import ModelOptions, ParallelDegree, PositiveFloat, PositiveInt

_NO_PADDING = "sequences are batched without padding"
_NO_QUANTIZATION = "remove the key"

Fraction = Annotated[float, Field(gt=0, lt=1), Allowed("a number between 0 and 1")]


class HuggingFaceOptions(ModelOptions):
    """Keys of serving.properties for a model that transformers runs."""

    tensor_parallel_degree: ParallelDegree = Field(
        -1, description="Devices that one model is split over; max is all of the machine's, -1 leaves it open."
    )
    device_map: str | None = Field(
        None, description="Placement over devices as transformers takes it: auto, balanced, balanced_low_0, sequential."
    )
    low_cpu_mem_usage: Annotated[bool, NoEffect("transformers always loads this way")] = Field(
        False, description="Load weights one by one instead of twice the model's memory."
    )
    quantize: Annotated[
        Literal["bitsandbytes", "bitsandbytes4", "bitsandbytes8", "gptq", "awq"] | None,
        Unavailable(lambda method: method is not None, _NO_QUANTIZATION),
    ] = Field(None, description="Quantisation of the weights.")
    load_in_4bit: Annotated[
        bool, Deprecated("use option.quantize=bitsandbytes4"), Unavailable.values(True, instead=_NO_QUANTIZATION)
    ] = Field(False, description="Quantise the weights to 4 bits.")
    load_in_8bit: Annotated[
        bool, Deprecated("use option.quantize=bitsandbytes8"), Unavailable.values(True, instead=_NO_QUANTIZATION)
    ] = Field(False, description="Quantise the weights to 8 bits.")
    disable_flash_attn: Annotated[bool, Unavailable.values(False, instead="remove the key")] = Field(
        True, description="Do not use the flash attention of transformers."
    )
    decoding_strategy: Annotated[
        Literal["greedy", "sample", "contrastive"],
        BeforeValidator(lambda value: "sample" if value == "sampling" else value),
        Unavailable.values("sample", "contrastive", instead="send do_sample=true with the requests that sample"),
    ] = Field("greedy", description="Decoding of requests that do not say do_sample themselves.")
    max_sparsity: Annotated[Fraction, NoEffect(_NO_PADDING)] = Field(
        0.33, description="Share of padding at which a batch is split."
    )
    max_splits: Annotated[PositiveInt, NoEffect(_NO_PADDING)] = Field(
        3, description="Parts that a batch may be split into."
    )
    max_model_len: PositiveInt | None = Field(
        None, description="Tokens of prompt and output together; without it what config.json allows."
    )
    chunked_prefill_size: PositiveInt | None = Field(
        None, description="Prompt tokens computed per step beside decoding; without it the handler chooses."
    )
    mem_fraction_static: Fraction | None = Field(
        None, description="Share of the memory of the device for weights and KV cache; without it the handler chooses."
    )
    kv_cache_memory_gb: PositiveFloat | None = Field(
        None, description="Memory of the KV cache in GiB, taken when the model loads; it never grows."
    )
    threads: PositiveInt | None = Field(None, description="Threads of one worker inside an operation on the CPU.")
    enable_torch_compile: Annotated[bool, Unavailable.values(True, instead="remove the key")] = Field(
        False, description="Compile the decode step when the model loads."
    )
