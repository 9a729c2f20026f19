"""Triton kernels beside products of 8-bit floats: they round activations, and apply scales to products."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803 - Triton's constants are written in capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _round_rows(rows, rounded, scales, width, BLOCK: tl.constexpr):
    """(n, width) -> (n, width) E4M3 and (n,) float32, the largest value of a row becomes 448. Grid: (n,)."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        states = tl.load(rows + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(states))
    scale = tl.maximum(tl.max(most, 0) / 448.0, 1e-12)
    tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        states = tl.load(rows + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        states = tl.clamp(states / scale, -448.0, 448.0)
        tl.store(rounded + row * width + column, states.to(rounded.dtype.element_ty), mask=column < width)


def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return contiguous rows (n, width) in E4M3, and their scales (n, 1)."""
    rounded = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    scales = rows.new_empty((len(rows), 1), dtype=torch.float32)
    if len(rows):
        with torch.cuda.device_of(rows):
            _round_rows[(len(rows),)](rows, rounded, scales, rows.shape[1], BLOCK=_BLOCK)
    return rounded, scales


@triton.jit
def _scale(products, row_scales, scales, width, BLOCK: tl.constexpr):
    """Multiply products (n, width) by the scales of their rows, (n,), and of their columns, (width,), in place."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = products + row * width + column
    exact = tl.load(target, mask=column < width, other=0.0).to(tl.float32)
    exact *= tl.load(row_scales + row) * tl.load(scales + column, mask=column < width, other=0.0)
    tl.store(target, exact.to(products.dtype.element_ty), mask=column < width)


def scale(products: torch.Tensor, row_scales: torch.Tensor, scales: torch.Tensor) -> None:
    """Multiply contiguous products (n, width) by `row_scales` (n, 1) and `scales` (width,), in place."""
    width = products.shape[1]
    if len(products):
        with torch.cuda.device_of(products):
            _scale[(len(products), triton.cdiv(width, _BLOCK))](products, row_scales, scales, width, BLOCK=_BLOCK)
