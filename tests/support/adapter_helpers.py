"""LoRA adapters with random weights, as peft saves them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_adapter(model: Any, directory: Path, seed: int = 0, **config: Any) -> Path:
    """Save an adapter for `model` with weights so large that it changes most tokens."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR, "task_type": "CAUSAL_LM", **config}
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    adapted.save_pretrained(str(directory), save_embedding_layers=False)
    return directory


def with_adapter(model: Any, directory: Path) -> Any:
    """Return a copy of `model` under peft with the adapter in `directory`."""
    return PeftModel.from_pretrained(copy.deepcopy(model), str(directory)).eval()
