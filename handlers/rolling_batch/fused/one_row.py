"""Decoder layers of one row on a GPU: four launches of one kernel in the place of cuBLAS's and those between them.

For two rows and more cuBLAS is faster: tensor cores multiply up to eight rows in the time of one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from handlers.checkpoints.fp8.layers import Fp8Linear
from handlers.checkpoints.grouped.launch import weight_constants
from handlers.checkpoints.grouped.layers import GroupedLinear
from handlers.rolling_batch.attention.decode_passes import CudaCapture
from handlers.rolling_batch.attention.gpu_times import median_seconds
from handlers.rolling_batch.fused.grouped_row_kernel import grouped_row_kernel
from handlers.rolling_batch.fused.modules import FusedRMSNorm, close, is_plain
from handlers.rolling_batch.fused.one_row_kernel import linear_kernel

logger = logging.getLogger(__name__)

_CHAINING = (9, 0)  # from which compute capability on launches may overlap
_STAGES = 3  # steps whose weights are on their way, of the kernel for weights with scales of groups
_DTYPES = (torch.bfloat16, torch.float32)  # a row that is not normed yet may be too large for float16


@dataclass(frozen=True)
class Tiles:
    """How many outputs a program computes, in steps of how many inputs, with how many warps.

    For weights with scales of groups, how many lines of the weight a program reads, in steps of how many bytes.
    """

    outputs: int
    step: int
    warps: int


TILES, FP8_TILES, GROUPED_TILES = Tiles(4, 1024, 4), Tiles(4, 512, 4), Tiles(16, 512, 4)
"""Measured on an H200, the second for weights in 8-bit floats, the last for those with scales of groups."""


def multiply(
    row: torch.Tensor,
    linear: Any,
    norm: FusedRMSNorm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    chained: bool = False,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Return `linear` of a contiguous row (1, width), with what `linear_kernel` does beside it.

    `chained`: the launch may begin before the one in front of it has ended.
    """
    outputs = linear.out_features // 2 if gated else linear.out_features
    out = row.new_empty((1, outputs))
    kernel, tiles, constants = _kernel_of(row, linear, gated, tiles)
    kernel[(triton.cdiv(outputs, tiles.outputs),)](
        row=row,
        scale=row if norm is None else norm.weight,
        bias=row if linear.bias is None else linear.bias,
        residual=row if residual is None else residual,
        out=out,
        width=row.shape[1],
        outputs=outputs,
        epsilon=0.0 if norm is None else norm.epsilon,
        OUTPUTS=tiles.outputs,
        SCALED=norm is not None,
        BIASED=linear.bias is not None,
        GATED=gated,
        ADDED=residual is not None,
        CHAINED=chained,
        num_warps=tiles.warps,
        **constants,
        **({"launch_pdl": True} if chained else {}),
    )
    return out


def _kernel_of(row: torch.Tensor, linear: Any, gated: bool, tiles: Tiles | None) -> tuple[Any, Tiles, dict[str, Any]]:
    """Return the kernel for a layer's weight, its tiles, and what it is told of the weight."""
    if isinstance(linear, GroupedLinear):
        tiles = tiles or GROUPED_TILES
        tiles = replace(tiles, outputs=tiles.outputs // 2) if gated else tiles  # a gate has a line of its own
        constants = weight_constants(linear)
        chunks = max(tiles.step * 8 // (linear.chunk * linear.bits), 1)
        return grouped_row_kernel, tiles, {**constants, "CHUNKS": chunks, "STAGES": _STAGES}
    scales = getattr(linear, "scales", None)
    tiles = tiles or (TILES if scales is None else FP8_TILES)
    constants = {"weight": linear.weight, "weight_scales": row if scales is None else scales}
    return linear_kernel, tiles, {**constants, "STEP": tiles.step, "ROUNDED": scales is not None}


def takes(layer: Any) -> bool:
    """Whether the kernel computes the linear layers of a fused decoder layer."""
    linears = (layer.qkv_proj, layer.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    known = all(isinstance(linear, Fp8Linear) or _is_in_order(linear) or is_plain(linear) for linear in linears)
    known = known and layer.input_layernorm.weight.dtype in _DTYPES
    return known and bool(layer.mlp.is_silu)


def _is_in_order(linear: Any) -> bool:
    return isinstance(linear, GroupedLinear) and linear.order is None


def choose(layers: Sequence[Any]) -> bool:
    """Measure whether one row is faster by the kernel in all layers, and set `by_one_row`; return it.

    Both ways are recorded as CUDA graphs, as decoding is.
    """
    layers = [layer for layer in layers if takes(layer)]
    for layer in layers:
        layer.chained = torch.cuda.get_device_capability(layer.input_layernorm.weight.device) >= _CHAINING
    if not layers or not _agree(layers[0]):
        return False
    one, other = (_seconds(layers, by_kernel) for by_kernel in (True, False))
    logger.info("the linear layers take %.0f us for one row by one kernel, %.0f us by torch", 1e6 * one, 1e6 * other)
    for layer in layers:
        layer.by_one_row = one < other
    return one < other


def _agree(layer: Any) -> bool:
    """Whether both ways compute the same."""
    row = _random_row(layer)
    other, one = (_without_attention(layer, row, by_kernel) for by_kernel in (False, True))
    return close(other - row, one - row)


def _random_row(layer: Any) -> torch.Tensor:
    weight = layer.input_layernorm.weight
    return torch.randn((1, len(weight)), generator=torch.Generator().manual_seed(0)).to(weight)


def _without_attention(layer: Any, row: torch.Tensor, by_kernel: bool) -> torch.Tensor:
    """Compute the linear layers of a decoder layer, with queries in the place of attended values."""
    with torch.inference_mode():
        return layer.linears(row, lambda qkv: qkv[:, : layer.qkv_widths[0]].contiguous(), by_kernel)


def _seconds(layers: Sequence[Any], by_kernel: bool) -> float:
    """Return the median time of the linear layers of all decoder layers."""
    row = _random_row(layers[0])

    def run() -> torch.Tensor:
        for layer in layers:
            computed = _without_attention(layer, row, by_kernel)
        return computed

    with torch.inference_mode():
        replay = CudaCapture()(run)
    return median_seconds(replay)
