"""The options of the huggingface handler; importable without its engine, so that the server can check them at start."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from handlers.rolling_batch_options import RollingBatchOptions
from lmi_server.configuration.declaration import Allowed, Deprecated, Documented, Finding, NoEffect, Unavailable
from lmi_server.configuration.options import MPI_MODE_DESCRIPTION, Fraction, ParallelDegree, PositiveInt

_NO_PADDING = "sequences are batched without padding"
_NO_QUANTIZATION = "remove the key"

DeviceMap = Annotated[
    str,
    Field(pattern=r"^(auto|balanced|balanced_low_0|sequential|cpu|cuda(:\d+)?)$"),
    Allowed("auto, balanced, balanced_low_0, sequential, cpu, cuda, cuda:N"),
]


class HuggingFaceOptions(RollingBatchOptions):
    """Keys of serving.properties for a model that transformers runs."""

    mpi_mode: bool = Field(False, description=MPI_MODE_DESCRIPTION)
    tensor_parallel_degree: ParallelDegree = Field(
        -1,
        description="Ranks that one model is split over, under the MPI engine; max is the machine's GPUs, -1 is one.",
    )
    device_map: Annotated[
        DeviceMap | None, Documented("auto", "with GPUs the whole model goes to the worker's own, as auto would put it")
    ] = Field(None, description="Placement of the layers over devices, as transformers takes it.")
    device_id: Annotated[
        int, Field(ge=-1), Allowed("an integer of 0 or more, or -1"), NoEffect("the server sets it")
    ] = Field(-1, description="GPU of the worker.")
    low_cpu_mem_usage: Annotated[bool, NoEffect("transformers always loads this way")] = Field(
        False, description="Load weights one by one instead of twice the model's memory."
    )
    quantize: Annotated[
        Literal["bitsandbytes", "bitsandbytes4", "bitsandbytes8", "gptq", "awq"] | None,
        Unavailable(lambda method: method is not None, _NO_QUANTIZATION),
    ] = Field(None, description="Quantisation of the weights.")
    load_in_4bit: Annotated[
        bool,
        Deprecated("use option.quantize=bitsandbytes4", becomes=("option.quantize", "bitsandbytes4")),
        Unavailable.values(True, instead=_NO_QUANTIZATION),
    ] = Field(False, description="Quantise the weights to 4 bits.")
    load_in_8bit: Annotated[
        bool,
        Deprecated("use option.quantize=bitsandbytes8", becomes=("option.quantize", "bitsandbytes8")),
        Unavailable.values(True, instead=_NO_QUANTIZATION),
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
    multi_gpu: Annotated[
        Literal["lmi_dist_sharding"] | None,
        Deprecated("use option.tensor_parallel_degree"),
        Unavailable(lambda name: name is not None, "remove the key"),
    ] = Field(None, description="Sharding of a rolling batch over GPUs.")
    stop_sequence: Annotated[str | None, Unavailable(lambda text: text is not None, "send `stop` with the request")] = (
        Field(None, description="Texts that end every answer, as a list in brackets.")
    )
    max_model_len: PositiveInt | None = Field(
        None, description="Tokens of prompt and output together; without it what config.json allows."
    )
    threads: PositiveInt | None = Field(None, description="Threads of one worker inside an operation on the CPU.")
    enable_torch_compile: Annotated[bool, Unavailable.values(True, instead="remove the key")] = Field(
        False, description="Compile the decode step when the model loads."
    )

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return what `from_pretrained` of transformers is given beside the model, without what is its default."""
        decided = {
            "dtype": self.dtype,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            "device_map": self.device_map,
        }
        return {name: value for name, value in decided.items() if value}

    def context_length(self) -> int | None:
        return self.max_model_len

    def unavailable(self) -> Iterator[Finding]:
        if not self.mpi_mode and self.tensor_parallel_degree not in (1, -1, "max"):
            yield Finding(("option.tensor_parallel_degree",), "use engine=MPI, or 1")

    def contradictions(self, given: Collection[str]) -> Iterator[Finding]:
        if self.quantize in ("bitsandbytes4", "bitsandbytes8") and not self._is_placed():
            yield Finding(
                ("option.quantize", "option.device_map", "option.tensor_parallel_degree"),
                f"{self.quantize} only with option.device_map, or with option.tensor_parallel_degree above 0",
            )

    def _is_placed(self) -> bool:
        return self.device_map is not None or self.tensor_parallel_degree != -1
