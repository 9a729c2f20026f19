"""Launches the kernels for weights in few bits, in tiles that fit the layer and the GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

from handlers.checkpoints.grouped import kernels

_CONVERTS_FLOAT8 = (8, 9)  # compute capability
_SUM_BLOCK = 1024
_MAX_SPLITS = 16
_UNPACKED_LINES = 32  # that a program writes, of one chunk of inputs
_MIN_STEPS = 4  # tiles that a program adds up at least


@dataclass(frozen=True)
class Tiles:
    """How many outputs a program computes, for up to how many rows, with how many warps and stages of loads.

    `waves`: how many programs each processor of the GPU gets, about, if the inputs can be split so.
    """

    outputs: int = 64
    rows: int = 64
    warps: int = 4
    stages: int = 3
    waves: int = 2


TILES = Tiles()


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def _is_native(device: torch.device) -> bool:
    return device.type == "cuda" and tuple(torch.cuda.get_device_capability(device)) >= _CONVERTS_FLOAT8


def weight_constants(linear: Any) -> dict[str, Any]:
    """Return what the kernels are told of a layer's numbers, and its weight as they take it."""
    return {
        "weight": linear.weight,
        "scales": linear.scales,
        "zeros": linear.weight if linear.zeros is None else linear.zeros,
        "bytes_of_line": linear.weight.shape[1],
        "groups": linear.scales.shape[1],
        "CHUNK": linear.chunk,
        "GROUP": linear.group,
        "BITS": linear.bits,
        "FLOATS": linear.is_float,
        "NATIVE": linear.is_float and _is_native(linear.weight.device),
        "ZERO": linear.zero,
        "ZEROED": linear.zeros is not None,
    }


def step_of(group: int) -> int:
    """Return how many inputs a tile has: those of one scale, if these are enough."""
    return 64 if group % 64 == 0 and group % 128 else 128


def splits_for(width: int, group: int, programs: int, processors: int, tiles: Tiles = TILES) -> int:
    """Return among how many programs the inputs of a product are split, if `programs` compute its outputs."""
    steps, splits = triton.cdiv(width, step_of(group)), 1
    enough = processors * tiles.waves * 3 // 4
    while splits < _MAX_SPLITS and programs * splits < enough and steps >= 2 * splits * _MIN_STEPS:
        splits *= 2
    return splits


def few_rows(rows: torch.Tensor, linear: Any, tiles: Tiles = TILES) -> torch.Tensor:
    """Return contiguous rows (n, in) times a layer's weight, with its bias, (n, out)."""
    count, width = rows.shape
    outputs = linear.out_features
    out = rows.new_empty((count, outputs))
    if not count:
        return out
    padded = min(max(triton.next_power_of_2(count), 16), tiles.rows)
    lines, blocks = triton.cdiv(outputs, tiles.outputs), triton.cdiv(count, padded)
    splits = splits_for(width, linear.group, lines * blocks, _processors(rows.device), tiles)
    step = step_of(linear.group)
    steps = triton.cdiv(triton.cdiv(width, step), splits)
    target = out if splits == 1 else rows.new_empty((splits, count, outputs), dtype=torch.float32)
    bias = rows if linear.bias is None else linear.bias
    with _on(rows):
        kernels.few_rows_kernel[(lines, splits, blocks)](
            rows=rows, bias=bias, out=target, count=count, width=width, outputs=outputs,
            steps=steps, **weight_constants(linear),
            ROWS=padded, OUTPUTS=tiles.outputs, STEP=step, BIASED=linear.bias is not None, PARTIAL=splits > 1,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        if splits > 1:
            size = count * outputs
            kernels.sum_kernel[(triton.cdiv(size, _SUM_BLOCK),)](
                target, bias, out, size, outputs, SPLITS=splits, BLOCK=_SUM_BLOCK, BIASED=linear.bias is not None
            )
    return out


def unpacked(linear: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a layer's weight (out, in) in a type."""
    outputs, width = linear.out_features, linear.in_features
    out = torch.empty((outputs, width), dtype=dtype, device=linear.weight.device)
    grid = width // linear.chunk, triton.cdiv(outputs, _UNPACKED_LINES)
    with _on(out):
        kernels.unpack_kernel[grid](
            out=out, width=width, outputs=outputs, **weight_constants(linear), OUTPUTS=_UNPACKED_LINES
        )
    return out


def _on(tensor: torch.Tensor) -> Any:
    return torch.cuda.device_of(tensor)
