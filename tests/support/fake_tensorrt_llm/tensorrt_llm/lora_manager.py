"""The configuration of LoRA adapters."""

from __future__ import annotations

from pydantic import Field

from tensorrt_llm.llmapi.strict import StrictBaseModel


class LoraConfig(StrictBaseModel):
    lora_dir: list[str] = Field(default_factory=list)
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    lora_target_modules: list[str] = Field(default_factory=list)
    trtllm_modules_to_hf_modules: dict[str, str] = Field(default_factory=dict)
    max_loras: int | None = None
    max_cpu_loras: int | None = None
