"""Checkpoints whose layers are saved as blocks of few bits, which `lmi-server partition` writes.

A layer has `blocks`, (outputs, bytes of a row) uint8, as formats.py describes them; config.json has the format of each.
No other program reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from handlers.checkpoints.blocks.formats import FORMATS, StoredWeight
from handlers.checkpoints.blocks.layers import BlockLinear, StoredEmbedding
from lmi_server.contract.errors import ModelLoadError

BLOCKS = "blocks"
"""The quant_method in config.json."""
SHARED, _FORMATS = "shared_by_embeddings", "formats"


def save_blocks(model: Any, kept: Mapping[str, StoredWeight], directory: Path) -> None:
    """Write a quantised model: what its layers store, by name, and all other tensors. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    head = next((name for name in kept if model.get_submodule(name) is model.get_output_embeddings()), None)
    is_shared = head is not None and isinstance(model.get_input_embeddings(), StoredEmbedding)
    declared = {
        "quant_method": BLOCKS,
        _FORMATS: {name: stored.format.name for name, stored in kept.items()},
        SHARED: head if is_shared else None,
    }
    # Tied weights are one tensor, which safetensors does not write twice; here the head and embeddings are no longer.
    config = model.config.to_dict() | {"quantization_config": declared}
    config |= {"tie_word_embeddings": False} if is_shared else {}
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    tensors |= {f"{name}.blocks": stored.raw.contiguous() for name, stored in kept.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    model.generation_config.save_pretrained(directory)


def saved_layer(
    packed: Any, tensors: Mapping[str, torch.Tensor], declared: Mapping[str, Any], dtype: torch.dtype
) -> nn.Module:
    """Return the layer, or the embeddings, of saved blocks. Raises ModelLoadError if they do not fit the model."""
    raw, formats = tensors["blocks"], declared.get(_FORMATS)
    known = FORMATS.get(str(formats.get(packed.stored_as))) if isinstance(formats, dict) else None
    if known is None:
        raise ModelLoadError(f"{packed.stored_as}: config.json has no format of its blocks; quantise the model again")
    stored = StoredWeight(known, raw)
    shape = packed.out_features, packed.in_features
    if (
        raw.dtype != torch.uint8
        or raw.ndim != 2
        or raw.shape[1] % known.block_bytes
        or (len(raw), stored.in_features) != shape
    ):
        raise ModelLoadError(
            f"{packed.stored_as}: blocks of {known.name} {tuple(raw.shape)} are no weights of {shape[1]} inputs and"
            f" {shape[0]} outputs; quantise the model again"
        )
    if packed.is_embedding:
        return StoredEmbedding(stored, dtype)
    return BlockLinear.from_stored(stored, tensors["bias"].to(dtype) if "bias" in tensors else None, dtype)
