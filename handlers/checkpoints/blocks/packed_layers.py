"""Takes weights that bitsandbytes has packed as blocks of few bits, on the CPU.

These are its 4 bits, and its 8 bits in a model in bfloat16. Numbers stay as they are. The scale of 8 bits, in float32,
becomes a float16, as blocks have it: it is rounded once, and more closely than to the model's bfloat16. 4 bits keep
their scales in float32. Layers of any other kind keep the code of their library.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import nn

from handlers.checkpoints.blocks.formats import INPUTS, Q8_0, Format, StoredWeight, codebook_format
from handlers.checkpoints.blocks.layers import KeptLayer, reads_codebooks
from handlers.checkpoints.blocks.rounding import halves

logger = logging.getLogger(__name__)

_ROUNDING = 2.0**-11  # of a float16 that is not subnormal


def keep_packed(model: Any) -> int:
    """Replace such layers of a model on the CPU by BlockLinear; return how many."""
    if model.dtype not in (torch.bfloat16, torch.float32):
        return 0
    kept = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            stored = _pack(child, model.dtype)
            if stored is not None:
                layer = KeptLayer(stored, None if child.bias is None else child.bias.detach())
                setattr(module, name, layer.module(model.dtype))
                kept += 1
    if kept:
        logger.info("%d packed layers are computed as blocks of few bits", kept)
    return kept


def _pack(layer: nn.Module, dtype: torch.dtype) -> StoredWeight | None:
    """Return the weights of a layer as blocks; None if it is of another kind, or its weights would change."""
    if "bitsandbytes" not in sys.modules:
        return None
    return _of_4_bits(layer) if hasattr(layer, "quant_state") else _of_8_bits(layer, dtype)


def _of_8_bits(layer: Any, dtype: torch.dtype) -> StoredWeight | None:
    """Return the weights of a layer of bitsandbytes with 8 bits."""
    from bitsandbytes.nn.modules import Linear8bitLt

    if not isinstance(layer, Linear8bitLt) or layer.weight.device.type != "cpu" or layer.in_features % INPUTS:
        return None
    found: Any = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
    scales = found.float() / 127
    if dtype != torch.bfloat16 or not bool(((scales.half().float() - scales).abs() <= scales * _ROUNDING).all()):
        return None
    blocks = layer.in_features // INPUTS
    numbers = layer.weight.data.view(torch.int8).unflatten(1, (-1, INPUTS))
    return as_blocks(Q8_0, numbers, scales.half()[:, None].repeat(1, blocks))


def _of_4_bits(layer: Any) -> StoredWeight | None:
    """Return the weights of a layer of bitsandbytes with 4 bits, whose blocks are whole parts of rows."""
    from bitsandbytes.functional import dequantize_blockwise
    from bitsandbytes.nn.modules import Linear4bit

    if not isinstance(layer, Linear4bit) or layer.weight.device.type != "cpu" or not reads_codebooks():
        return None
    state: Any = layer.weight.quant_state
    is_packed_otherwise = getattr(state, "packing_format_for_cpu", False)  # what its own kernel for the CPU reads
    if is_packed_otherwise or state.blocksize % INPUTS or layer.in_features % state.blocksize:
        return None
    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(scales, state.state2) + state.offset
    packed = layer.weight.data.view(layer.out_features, -1)
    numbers = torch.stack((packed >> 4, packed & 15), dim=2).view(layer.out_features, -1, INPUTS)
    by_block = scales.float().view(layer.out_features, -1).repeat_interleave(state.blocksize // INPUTS, 1)
    return as_blocks(codebook_format(state.code.float()), halves(numbers), by_block)


def as_blocks(form: Format, numbers: torch.Tensor, *scales: torch.Tensor) -> StoredWeight:
    """Return numbers (out, blocks, bytes of a block) as blocks, each with its own of some scales (out, blocks)."""
    of_bytes = [part.contiguous()[:, :, None].view(torch.uint8) for part in scales]
    return StoredWeight(form, torch.cat((*of_bytes, numbers.view(torch.uint8)), dim=2).flatten(1))
