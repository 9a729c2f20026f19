"""The configuration of a Hugging Face model as typed values, and the arguments of `from_pretrained` that they mean."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from pydantic import Field, model_validator

from djl_python.properties_manager.properties import Properties, RollingBatchEnum, is_rolling_batch_enabled
from lmi_server.machine.environment import process_environment

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
_LOADED_IN = {"bitsandbytes8": "load_in_8bit", "bitsandbytes4": "load_in_4bit"}


def get_torch_dtype_from_str(dtype: str | None) -> Any:
    """Return torch's data type of a value of option.dtype; "auto" and None as they are. Raises ValueError."""
    if dtype is None or dtype == "auto":
        return dtype
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not allowed; allowed: auto, {', '.join(_DTYPES)}")
    return getattr(importlib.import_module("torch"), _DTYPES[dtype])


class HuggingFaceProperties(Properties):
    """`kwargs` are arguments of transformers' `from_pretrained`; `device` is torch's name of the GPU, None without."""

    device_id: int = -1
    task: str | None = None
    tensor_parallel_degree: int = -1
    pipeline_parallel_degree: int = -1
    device_map: str | None = None
    load_in_4bit: bool | None = None
    load_in_8bit: bool | None = None
    quantize: str | None = None
    low_cpu_mem_usage: bool | None = False
    disable_flash_attn: bool | None = True
    device: str | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict)
    data_type: str | None = None
    is_peft_model: bool = False

    @model_validator(mode="after")
    def _derive(self) -> HuggingFaceProperties:
        self._set_quantize()
        self.device = f"cuda:{self.device_id}" if self.device_id >= 0 else None
        self.kwargs |= {"trust_remote_code": self.trust_remote_code, **self._optional_arguments()}
        self._set_device_map()
        self._set_quantized_loading()
        if self.mpi_mode and is_rolling_batch_enabled(self.rolling_batch):
            self.device = process_environment().get("LOCAL_RANK", "0")
        return self

    def _set_quantize(self) -> None:
        for method, old_key in _LOADED_IN.items():
            if getattr(self, old_key):
                logger.warning("option.%s is deprecated; set option.quantize=%s", old_key, method)
                self.quantize = method
        if self.quantize == "bitsandbytes8" and self.rolling_batch is RollingBatchEnum.vllm:
            self.quantize = "bitsandbytes"  # vLLM's name

    def _optional_arguments(self) -> dict[str, Any]:
        rolling = is_rolling_batch_enabled(self.rolling_batch)
        given = {
            "low_cpu_mem_usage": self.low_cpu_mem_usage,
            "revision": self.revision,
            "waiting_steps": self.waiting_steps if rolling else None,
            "torch_dtype": get_torch_dtype_from_str(self.dtype.lower()) if self.dtype else None,
        }
        return {name: value for name, value in given.items() if value}

    def _set_device_map(self) -> None:
        if self.device_map:
            self.kwargs["device_map"] = self.device_map
            self.device = None
            return
        degree = self.tensor_parallel_degree * self.pipeline_parallel_degree
        split = min(self.tensor_parallel_degree, self.pipeline_parallel_degree, self.cluster_size) > 0
        if not split or not is_rolling_batch_enabled(self.rolling_batch):
            return
        gpus = importlib.import_module("torch").cuda.device_count() * self.cluster_size
        if not gpus:
            return
        if gpus != degree:
            raise ValueError(
                f"tensor_parallel_degree * pipeline_parallel_degree is {degree}, but there are {gpus} GPUs; set degrees"
                " whose product is that number"
            )
        self.kwargs["device_map"] = "auto"
        self.device = None

    def _set_quantized_loading(self) -> None:
        argument = _LOADED_IN.get(self.quantize or "")
        if argument is None or self.rolling_batch is RollingBatchEnum.vllm:
            return
        if "device_map" not in self.kwargs:
            raise ValueError(f"quantize={self.quantize} takes a device_map; set option.device_map=auto")
        self.kwargs[argument] = True
