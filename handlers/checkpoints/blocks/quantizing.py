"""Quantises the linear layers of a model, its embeddings and its head to blocks of few bits."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from handlers.checkpoints.blocks.formats import INPUTS, Q4_K
from handlers.checkpoints.blocks.free_cores import only_free_cores
from handlers.checkpoints.blocks.layers import KeptLayer, StoredEmbedding
from handlers.checkpoints.blocks.rounding import quantize
from handlers.checkpoints.quantization import weight_details
from handlers.torch_operators.read_weights import read_weights

logger = logging.getLogger(__name__)

# What a head gets, and the embeddings that share its weights: they lose more than layers do, as in llama.cpp's files.
_OF_HEAD = {"q8_0": "q8_0", "q4_0": "q8_0", "q4_k": "q8_0", "int8": "int8"}


def quantize_to_blocks(
    model: Any, name: str, kept: dict[str, KeptLayer] | None = None, on_gpu: bool = False
) -> dict[str, Any]:
    """Quantise the plain linear layers of `model` in place, and its head and embeddings; return details for the log.

    Of a model that is split over ranks, it does so with the part of this rank. `kept` gets what layers store, by name.
    `on_gpu`: layers hold weights as a GPU computes with them. There embeddings stay as they are: rows are looked up.
    """
    before = model.get_memory_footprint()
    head: Any = model.get_output_embeddings()
    embeddings: Any = None if head is None else model.get_input_embeddings()  # without a head it may be an error
    head = getattr(head, "linear", head)  # the part of a rank
    left = 0
    for module_name, module in list(model.named_modules()):
        kind: Any = type(module)  # mypy takes a type of modules for unhashable
        for child_name, child in list(module.named_children()):
            if not isinstance(child, nn.Linear):
                continue
            if not _fits(child) or child_name in read_weights(kind, numbers=True):
                left += 1
            else:
                with only_free_cores():
                    stored = quantize(child.weight, _OF_HEAD[name] if child is head else _name_for(child, name))
                layer = KeptLayer(stored, None if child.bias is None else child.bias.detach())
                dtype = child.weight.dtype
                setattr(module, child_name, layer.gpu_module(dtype) if on_gpu else layer.module(dtype))
                if kept is not None:
                    kept[f"{module_name}.{child_name}".removeprefix(".")] = layer
                is_shared = type(embeddings) is nn.Embedding and embeddings.weight is child.weight
                if child is head and is_shared and not on_gpu:
                    model.set_input_embeddings(StoredEmbedding(stored, head.weight.dtype))
    if left:
        logger.warning(
            "option.quantize=%s: %d linear layers keep their weights: their widths are no multiple of %d, or the"
            " model's code reads these weights itself", name, left, INPUTS,
        )  # fmt: skip
    return weight_details(name, model.get_memory_footprint(), before)


def _fits(linear: Any) -> bool:
    return type(linear) is nn.Linear and linear.in_features % INPUTS == 0 and linear.weight.is_floating_point()


def _name_for(linear: nn.Linear, name: str) -> str:
    """Return what a layer gets: one whose width is no multiple of a super-block has minima for each block instead."""
    return "q4_1" if name == "q4_k" and linear.in_features % Q4_K.block_inputs else name
