"""The configuration of a model for TensorRT-LLM as typed values. This server reads it otherwise."""

from __future__ import annotations

from typing import Any, NoReturn

from pydantic import ConfigDict, field_validator

from djl_python.not_here import TENSORRT_LLM, not_here
from djl_python.properties_manager.properties import Properties, RollingBatchEnum

TRT_SUPPORTED_ROLLING_BATCH_TYPES = [
    RollingBatchEnum.auto.value,
    RollingBatchEnum.trtllm.value,
    RollingBatchEnum.disable.value,
]


class TensorRtLlmProperties(Properties):
    """Keys that are no fields are kept, because TensorRT-LLM may know them."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    @field_validator("rolling_batch", mode="before")
    @classmethod
    def validate_rolling_batch(cls, rolling_batch: Any) -> str:
        value = str(getattr(rolling_batch, "value", rolling_batch)).lower()
        if value not in TRT_SUPPORTED_ROLLING_BATCH_TYPES:
            raise ValueError(f"{value!r} is not allowed; allowed: {', '.join(TRT_SUPPORTED_ROLLING_BATCH_TYPES)}")
        return value

    def get_kv_cache_config(self) -> NoReturn:
        not_here("get_kv_cache_config", TENSORRT_LLM)

    def get_pytorch_config(self) -> NoReturn:
        not_here("get_pytorch_config", TENSORRT_LLM)

    def get_llm_kwargs(self) -> NoReturn:
        not_here("get_llm_kwargs", TENSORRT_LLM)
