"""The options that handlers of Hugging Face checkpoints share; importable without transformers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from lmi_server.configuration.declaration import Allowed, Deprecated, Documented, Finding, NoEffect, Unavailable
from lmi_server.configuration.options import ModelOptions, ParallelDegree, PositiveInt

_NO_QUANTIZATION = "remove the key"

DeviceMap = Annotated[
    str,
    Field(pattern=r"^(auto|balanced|balanced_low_0|sequential|cpu|cuda(:\d+)?)$"),
    Allowed("auto, balanced, balanced_low_0, sequential, cpu, cuda, cuda:N"),
]


class TransformersOptions(ModelOptions):
    """Keys of serving.properties for a model that transformers loads."""

    tensor_parallel_degree: Annotated[
        ParallelDegree, Unavailable(lambda degree: degree not in (1, -1, "max"), "use 1")
    ] = Field(-1, description="Devices that one model is split over; max is all of the machine's, -1 is one.")
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
    threads: PositiveInt | None = Field(None, description="Threads of one worker inside an operation on the CPU.")

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return what `from_pretrained` of transformers is given beside the model, without what is its default."""
        decided = {
            "dtype": self.dtype,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            "device_map": self.device_map,
        }
        return {name: value for name, value in decided.items() if value}

    def contradictions(self, given: Collection[str]) -> Iterator[Finding]:
        if self.quantize in ("bitsandbytes4", "bitsandbytes8") and not self._is_placed():
            yield Finding(
                ("option.quantize", "option.device_map", "option.tensor_parallel_degree"),
                f"{self.quantize} only with option.device_map, or with option.tensor_parallel_degree above 0",
            )

    def _is_placed(self) -> bool:
        return self.device_map is not None or self.tensor_parallel_degree != -1
