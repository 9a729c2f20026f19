"""save_pretrained_split: a file for each weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from transformers_neuronx.recorded import record


def save_pretrained_split(model: Any, save_directory: str) -> None:
    record("save_pretrained_split", directory=str(save_directory))
    model.config.save_pretrained(save_directory)
    split = Path(save_directory) / "pytorch_model.bin"
    split.mkdir(parents=True)
    names = {key: f"p{index}.{key}" for index, key in enumerate(model.state_dict())}
    (split / "key_to_filename.json").write_text(json.dumps(names))
    for key, tensor in model.state_dict().items():
        torch.save(tensor, split / names[key])
