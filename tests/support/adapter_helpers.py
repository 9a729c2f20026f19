"""LoRA adapters with random weights, as peft saves them. peft is imported late, since that takes seconds."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch

from handlers.rolling_batch.lora.layers import LoraPair

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_adapter(model: Any, directory: Path, seed: int = 0, **config: Any) -> Path:
    """Save an adapter for `model` with weights so large that it changes most tokens."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR, "task_type": "CAUSAL_LM", **config}
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft says that it saves the weights of an adapted lm_head, too
        adapted.save_pretrained(str(directory))
    return directory


def with_adapter(model: Any, directory: Path) -> Any:
    """Return a copy of `model` under peft with the adapter in `directory`."""
    from peft import PeftModel

    return PeftModel.from_pretrained(copy.deepcopy(model), str(directory)).eval()


def read_adapter(directory: str) -> dict[str, LoraPair]:
    """Return the weights of an adapter, as the rolling batch reads them."""
    from handlers.rolling_batch.lora import checkpoint as lora_checkpoint

    return lora_checkpoint.read_adapter(directory)
