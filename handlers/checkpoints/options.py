"""The options that handlers of Hugging Face checkpoints share; importable without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from lmi_server.configuration.declaration import (
    Allowed,
    Deprecated,
    DeprecatedValue,
    Documented,
    NoEffect,
    Unavailable,
)
from lmi_server.configuration.options import ModelOptions, ParallelDegree, PositiveInt
from lmi_server.machine.threads import THREAD_VARIABLES

# By the quantisation method in config.json: the extra of lmi-server, and the packages in it that are needed.
QUANTIZATION_PACKAGES = {
    "bitsandbytes": ("bitsandbytes", ("bitsandbytes", "accelerate")),
    "gptq": ("gptq", ("gptqmodel", "optimum")),
    "awq": ("gptq", ("gptqmodel", "accelerate")),
    "compressed-tensors": ("compressed-tensors", ("compressed_tensors",)),
}
# nf4, because fp4, bitsandbytes' default for 4 bits, loses more: on the demo model half a nat of log probability per
# token instead of a quarter.
_QUANTIZATION: Mapping[str, Mapping[str, Any]] = {
    "bitsandbytes4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes8": {"load_in_8bit": True},
    "bitsandbytes": {"load_in_8bit": True},
}

DeviceMap = Annotated[
    str,
    Field(pattern=r"^(auto|balanced|balanced_low_0|sequential|cpu|cuda(:\d+)?)$"),
    Allowed("auto, balanced, balanced_low_0, sequential, cpu, cuda, cuda:N"),
]


class TransformersOptions(ModelOptions):
    """Keys of serving.properties for a model that transformers loads."""

    tensor_parallel_degree: Annotated[
        ParallelDegree, Unavailable(lambda degree: degree not in (1, -1, "max"), "use 1")
    ] = Field(-1, description="Devices that one model is split over; max means all GPUs of the machine, -1 one.")
    device_map: Annotated[
        DeviceMap | None, Documented("auto", "a worker with a GPU loads the whole model on it, as auto would")
    ] = Field(None, description="Placement of the layers on devices, as transformers defines it.")
    device_id: Annotated[
        int, Field(ge=-1), Allowed("an integer of 0 or more, or -1"), NoEffect("the server sets it")
    ] = Field(-1, description="GPU of the worker.")
    low_cpu_mem_usage: Annotated[bool, NoEffect("transformers always loads this way")] = Field(
        False, description="Load weights one by one instead of twice the model's memory."
    )
    quantize: Annotated[
        Literal["bitsandbytes", "bitsandbytes4", "bitsandbytes8", "gptq", "awq"] | None,
        DeprecatedValue("bitsandbytes", "use bitsandbytes8"),
    ] = Field(
        None,
        description="Quantisation of the weights: by bitsandbytes while they load; gptq and awq by the checkpoint.",
    )
    load_in_4bit: Annotated[
        bool, Deprecated("use option.quantize=bitsandbytes4", becomes=("option.quantize", "bitsandbytes4"))
    ] = Field(False, description="Quantise the weights to 4 bits.")
    load_in_8bit: Annotated[
        bool, Deprecated("use option.quantize=bitsandbytes8", becomes=("option.quantize", "bitsandbytes8"))
    ] = Field(False, description="Quantise the weights to 8 bits.")
    disable_flash_attn: Annotated[
        bool, NoEffect("attention runs on torch's kernels, which take flash attention where they can")
    ] = Field(True, description="Do not use the flash attention of transformers.")
    save_mp_checkpoint_path: str | None = Field(
        None, description="Directory to write quantised weights to while the model loads."
    )
    threads: PositiveInt | None = Field(None, description="Threads that a worker uses inside an operation on the CPU.")

    def worker_environment(self) -> Mapping[str, str]:
        return THREAD_VARIABLES

    def engine_arguments(self) -> Mapping[str, Any]:
        """Return the arguments of transformers' `from_pretrained` beside the model that differ from its defaults."""
        decided = {
            "dtype": self.dtype,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            "device_map": self.device_map,
            "quantization_config": self.quantization_config(),
        }
        return {name: value for name, value in decided.items() if value}

    def partitioned(self) -> Mapping[str, str | None] | str:
        if self.quantization_config() is None:
            return "set option.quantize=bitsandbytes4 or bitsandbytes8; weights as they are need no preparation"
        removed = ("model_id", "revision", "quantize", "load_in_4bit", "load_in_8bit", "save_mp_checkpoint_path")
        return {f"option.{name}": None for name in removed}

    def quantization_config(self) -> Mapping[str, Any] | None:
        """Return the settings with which bitsandbytes quantises while weights load; None if it does not.

        A checkpoint that is quantised already brings its own settings.
        """
        return _QUANTIZATION.get(self.quantize or "")
