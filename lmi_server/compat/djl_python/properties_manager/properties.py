"""The configuration of a model as typed values, for code that passes the properties of its first call on."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator


class RollingBatchEnum(StrEnum):
    """Values of `option.rolling_batch`."""

    vllm = "vllm"
    auto = "auto"
    disable = "disable"
    trtllm = "trtllm"


class StreamingEnum(StrEnum):
    """Values of `option.enable_streaming`."""

    true = "true"
    false = "false"
    huggingface = "huggingface"


def is_streaming_enabled(enable_streaming: StreamingEnum) -> bool:
    return enable_streaming is not StreamingEnum.false


def is_rolling_batch_enabled(rolling_batch: RollingBatchEnum) -> bool:
    return rolling_batch is not RollingBatchEnum.disable


class Properties(BaseModel):
    """`model_id_or_path` is `model_id` if that is set, otherwise `model_dir`. Other keys are ignored."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    model_id_or_path: str
    model_dir: str | None = None
    rolling_batch: RollingBatchEnum = RollingBatchEnum.auto
    tensor_parallel_degree: int = 1
    cluster_size: int = 1
    trust_remote_code: bool = False
    enable_streaming: StreamingEnum = StreamingEnum.false
    batch_size: int = 1
    max_rolling_batch_size: int = 32
    dtype: str | None = None
    revision: str | None = None
    output_formatter: str | Callable[..., Any] | None = None
    input_formatter: Callable[..., Any] | None = None
    waiting_steps: int | None = None
    mpi_mode: bool = False
    tgi_compat: bool = False
    bedrock_compat: bool = False
    enable_lora: bool = False
    lmcache_auto_config: bool = False
    draft_model_id: str | None = None
    spec_length: int = 0

    @model_validator(mode="before")
    @classmethod
    def set_model_id_or_path(cls, properties: dict[str, Any]) -> dict[str, Any]:
        return {**properties, "model_id_or_path": properties.get("model_id") or properties.get("model_dir")}

    @field_validator("enable_streaming", mode="before")
    @classmethod
    def validate_enable_streaming(cls, enable_streaming: Any) -> Any:
        return str(getattr(enable_streaming, "value", enable_streaming)).lower()

    @field_validator("batch_size")
    @classmethod
    def validate_batch_size(cls, batch_size: int, info: ValidationInfo) -> int:
        """Refuse batches of streams, which only a rolling batch can serve."""
        rolling, streaming = info.data.get("rolling_batch"), info.data.get("enable_streaming")
        if batch_size > 1 and rolling is RollingBatchEnum.disable and streaming is not StreamingEnum.false:
            raise ValueError("batch_size above 1 takes a rolling batch if enable_streaming is set")
        return batch_size
