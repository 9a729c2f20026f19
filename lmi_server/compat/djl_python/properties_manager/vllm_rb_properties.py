"""The configuration of a rolling batch over vLLM as typed values. The engine's arguments stay with the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from pydantic import ConfigDict, Field, field_validator, model_validator

from djl_python.not_here import VLLM_BATCH, not_here
from djl_python.properties_manager.properties import Properties

_TORCH_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

DTYPE_MAPPER = {**_TORCH_NAMES, **{name: name for name in _TORCH_NAMES.values()}, "auto": "auto"}


def construct_vllm_args_list(vllm_engine_args: Mapping[str, Any]) -> list[str]:
    """Return arguments of vLLM's command line: `--name value`, and `--name` or `--no-name` for true and false."""
    written: list[str] = []
    for name, value in vllm_engine_args.items():
        if str(value).lower() in ("true", "false"):
            written.append(f"--{name}" if str(value).lower() == "true" else f"--no-{name}")
        elif not isinstance(value, list):
            written += [f"--{name}", str(value)]
        elif value:
            written += [f"--{name}", *map(str, value)]
    return written


class VllmRbProperties(Properties):
    """Keys that are no fields are kept, because vLLM may know them."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    engine: str | None = None
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    quantize: str | None = Field(None, alias="quantization")
    max_rolling_batch_prefill_tokens: int | None = Field(None, alias="max_num_batched_tokens")
    cpu_offload_gb_per_gpu: float = Field(0, alias="cpu_offload_gb")
    dtype: str = "auto"
    max_loras: int = 4
    task: str = "auto"
    long_lora_scaling_factors: tuple[float, ...] | None = None
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    enable_reasoning: bool = False
    reasoning_parser: str | None = None
    device: str = "auto"
    normalize: bool = True
    chat_template: str | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"

    @field_validator("engine")
    @classmethod
    def validate_engine(cls, engine: str | None) -> str | None:
        if engine != "Python":
            raise ValueError("a rolling batch over vLLM takes engine=Python")
        return engine

    @field_validator("task")
    @classmethod
    def validate_task(cls, task: str) -> str:
        return "generate" if task == "text-generation" else task

    @field_validator("dtype")
    @classmethod
    def validate_dtype(cls, val: str) -> str:
        if val not in DTYPE_MAPPER:
            raise ValueError(f"dtype {val!r} is not allowed; allowed: {', '.join(DTYPE_MAPPER)}")
        return DTYPE_MAPPER[val]

    @field_validator("long_lora_scaling_factors", mode="before")
    @classmethod
    def validate_long_lora_scaling_factors(cls, val: Any) -> Any:
        """Read a text such as "4.0, 8" or "(4.0,)"."""
        return [part for part in val.strip("()[] ").split(",") if part.strip()] if isinstance(val, str) else val

    @model_validator(mode="after")
    def validate_pipeline_parallel(self) -> VllmRbProperties:
        if self.pipeline_parallel_degree != 1:
            raise ValueError("a rolling batch over vLLM takes pipeline_parallel_degree=1")
        return self

    def get_engine_args(self, async_engine: bool = False) -> NoReturn:
        not_here("get_engine_args", VLLM_BATCH)

    def get_additional_vllm_engine_args(self) -> dict[str, Any]:
        """Return the keys that are no fields."""
        return dict(self.__pydantic_extra__ or {})
