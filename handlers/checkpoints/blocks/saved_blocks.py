"""Checkpoints whose layers are saved as blocks of few bits, which `lmi-server partition` writes.

A layer has `blocks`, (outputs, bytes of a row) uint8, as formats.py describes them; config.json has the format of each.
With act-order it has `order` as well: the input that comes at each place. No other program reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from handlers.checkpoints.blocks.formats import FORMATS, Q4_ZERO, StoredWeight
from handlers.checkpoints.blocks.layers import KeptLayer, StoredEmbedding
from lmi_server.contract.errors import ModelLoadError

BLOCKS = "blocks"
"""The quant_method in config.json."""
SHARED, _FORMATS = "shared_by_embeddings", "formats"
_KNOWN = {**FORMATS, Q4_ZERO.name: Q4_ZERO}


def save_blocks(model: Any, kept: Mapping[str, KeptLayer], directory: Path) -> None:
    """Write a model of blocks: its layers by name, and all other tensors. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    head = next((name for name in kept if model.get_submodule(name) is model.get_output_embeddings()), None)
    is_shared = head is not None and isinstance(model.get_input_embeddings(), StoredEmbedding)
    declared = {
        "quant_method": BLOCKS,
        _FORMATS: {name: layer.stored.format.name for name, layer in kept.items()},
        SHARED: head if is_shared else None,
    }
    # Tied weights are one tensor, which safetensors does not write twice; here the head and embeddings are no longer.
    config = model.config.to_dict() | {"quantization_config": declared}
    config |= {"tie_word_embeddings": False} if is_shared else {}
    tensors = _other_tensors(model, kept)
    for name, layer in kept.items():
        tensors |= {f"{name}.{part}": tensor for part, tensor in layer.tensors().items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    if getattr(model, "generation_config", None) is not None:  # of models that do not generate
        model.generation_config.save_pretrained(directory)


def _other_tensors(model: Any, kept: Mapping[str, KeptLayer]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model outside of some layers, each once: tied ones have several names."""
    of_layers = tuple(f"{name}." for name in kept)
    by_place = {
        (tensor.data_ptr() or name, tensor.shape): (name, tensor)
        for name, tensor in reversed(model.state_dict().items())
        if not name.startswith(of_layers)
    }
    return {name: tensor.contiguous() for name, tensor in by_place.values()}


def saved_layer(
    packed: Any, tensors: Mapping[str, torch.Tensor], declared: Mapping[str, Any], dtype: torch.dtype
) -> nn.Module:
    """Return the layer, or the embeddings, of saved blocks. Raises ModelLoadError if they do not fit the model."""
    raw, formats, order = tensors["blocks"], declared.get(_FORMATS), tensors.get("order")
    known = _KNOWN.get(str(formats.get(packed.stored_as))) if isinstance(formats, dict) else None
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
    is_order = order is None or (
        order.dtype == torch.int64 and torch.equal(order.sort().values, torch.arange(shape[1]))
    )
    if not is_order:
        raise ModelLoadError(f"{packed.stored_as}: its order is none of {shape[1]} inputs; quantise the model again")
    if packed.is_embedding:
        return StoredEmbedding(stored, dtype)
    return KeptLayer(stored, packed.bias_of(tensors), order).module(dtype)
