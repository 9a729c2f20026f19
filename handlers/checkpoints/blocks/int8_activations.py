"""Layers of blocks whose activations take 8 bits: `option.activation_dtype=int8`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from handlers.checkpoints.blocks.layers import BlockLinear
from handlers.checkpoints.blocks.layout import FEW_ROWS, in_quads
from handlers.cpu_kernels.blocks.layout import EXACT_ROWS, UNPACKED_ROWS
from lmi_server.contract.errors import ModelLoadError

logger = logging.getLogger(__name__)


class Int8BlockLinear(BlockLinear):
    """A layer that rounds its activations to 8 bits, with a scale for each 32, for up to `exact_rows` rows.

    More rows are multiplied as those of BlockLinear are, where that is faster. Where tile registers multiply bytes and
    each output has one scale, still more rows are rounded with a scale for each row if that is faster. Products are
    exact: between two borders a row gets the same bits whatever other rows are in the batch; across them rounding makes
    a difference.
    """

    max_exact_rows = sys.maxsize

    @classmethod
    def from_linear(cls, linear: BlockLinear) -> Int8BlockLinear:
        """Return the layer that computes with the same weights."""
        from handlers.cpu_kernels import amx
        from handlers.cpu_kernels.int8.tiles import MAX_INPUTS

        widths = (linear.in_features, linear.out_features)
        laid = in_quads(linear.laid, amx.MULTIPLIES_BYTES and linear.in_features <= MAX_INPUTS)
        found = cls(laid[None], widths, linear.formats, linear.bias, linear.dtype)
        found.limit_exact_rows(found.unmeasured_rows)
        return found

    @property
    def unmeasured_rows(self) -> int:
        from handlers.cpu_kernels import amx

        return 2 * FEW_ROWS if amx.IS_USABLE else self.max_exact_rows

    def _kernel_for(self, dtype: torch.dtype) -> Any:
        from handlers.cpu_kernels.int8.linear import block_linear_int8, block_linear_int8_in_vectors

        return block_linear_int8 if dtype == torch.bfloat16 else block_linear_int8_in_vectors


@contextmanager
def unrounded_activations(*modules: nn.Module) -> Iterator[None]:
    """Let no layer of some modules round, for comparisons: rounding makes the slightest difference grow."""
    layers = {layer for module in modules for layer in module.modules() if isinstance(layer, Int8BlockLinear)}
    limits = {layer: layer.laid[0, [EXACT_ROWS, UNPACKED_ROWS]] for layer in layers}
    for layer in layers:
        layer.limit_exact_rows(0)
        layer.limit_unpacked_rows(sys.maxsize)
    try:
        yield
    finally:
        for layer, limit in limits.items():
            layer.laid[0, [EXACT_ROWS, UNPACKED_ROWS]] = limit


def round_activations(model: Any) -> None:
    """Have the layers of blocks of a model round their activations. Raises ModelLoadError if it has none."""
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is BlockLinear and "q4_code" not in child.formats:
                setattr(module, name, Int8BlockLinear.from_linear(child))
                count += 1
    if not count:
        raise ModelLoadError(
            "option.activation_dtype=int8 is for weights in blocks of few bits on the CPU, and this model has none;"
            " remove the key, or on a CPU set option.quantize=q8_0, q4_0, q4_k or int8"
        )
    logger.info("%d linear layers round their activations to 8 bits", count)
