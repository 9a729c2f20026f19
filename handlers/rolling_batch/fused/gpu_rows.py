"""The row kernels of a GPU, in Triton.

A recorded step of a small model is bound by the number of its kernels: transformers' RMS norm alone has eight.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# Triton infers the types of a kernel from its arguments; docstrings give shapes.

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MAX_BLOCK = 1024  # elements of a row that one program of an element-wise kernel computes


class GpuRowKernels:
    """See RowKernels. On the CPU these run under TRITON_INTERPRET=1 only."""

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        out = torch.empty_like(rows)
        width = rows.shape[1]
        if len(rows):
            block = triton.next_power_of_2(width)
            arguments = (rows, rows, weight, rows, out, width, epsilon, block, False)
            _rms_norm[(len(rows),)](*arguments, num_warps=_warps(block))
        return out

    def add_and_norm(
        self, rows: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        summed, out = torch.empty_like(rows), torch.empty_like(rows)
        width = rows.shape[1]
        if len(rows):
            block = triton.next_power_of_2(width)
            arguments = (rows, added, weight, summed, out, width, epsilon, block, True)
            _rms_norm[(len(rows),)](*arguments, num_warps=_warps(block))
        return summed, out

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        width = gate_up.shape[1] // 2
        out = gate_up.new_empty((len(gate_up), width))
        if len(out):
            block = min(triton.next_power_of_2(width), _MAX_BLOCK)
            _silu_and_mul[(len(out), triton.cdiv(width, block))](gate_up, out, width, block)
        return out

    def rotate(self, rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int) -> None:
        half = cosines.shape[1] // 2
        if len(rows):
            block = triton.next_power_of_2(half)
            _rotate[(len(rows), heads)](rows, cosines, sines, rows.shape[1], half, block, num_warps=1)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


@triton.jit
def _rms_norm(rows, added, weight, summed, out, width, epsilon, BLOCK: tl.constexpr, ADDS: tl.constexpr):  # noqa: N803
    """`rows / rms(rows) * weight`: (n, width) -> (n, width), rounded before the product, as by Llama's norm.

    ADDS: the norm is that of `rows + added`, which `summed` gets.
    """
    begin = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(rows + begin + column, mask=inside, other=0.0)
    scale = tl.load(weight + column, mask=inside, other=0.0)
    if ADDS:
        more = tl.load(added + begin + column, mask=inside, other=0.0)
        row = (row.to(tl.float32) + more.to(tl.float32)).to(row.dtype)
        tl.store(summed + begin + column, row, mask=inside)
    exact = row.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(exact * exact, axis=0) / width + epsilon)
    normed = (exact * factor).to(row.dtype).to(tl.float32)
    tl.store(out + begin + column, (normed * scale.to(tl.float32)).to(row.dtype), mask=inside)


@triton.jit
def _silu_and_mul(gate_up, out, width, BLOCK: tl.constexpr):  # noqa: N803
    """`silu(gate) * up`: (n, 2 * width) -> (n, width), the activation rounded before the product."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0)
    exact = gate.to(tl.float32)
    activated = (exact / (1.0 + tl.exp(-exact))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + column, (activated * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit
def _rotate(rows, cosines, sines, width, half, BLOCK: tl.constexpr):  # noqa: N803
    """Rotate head `program_id(1)` of row `program_id(0)` in place: its halves form the pairs."""
    row = tl.program_id(0).to(tl.int64)
    head = rows + row * width + tl.program_id(1) * 2 * half
    pair = tl.arange(0, BLOCK)
    inside = pair < half
    own = row * 2 * half + pair
    low = tl.load(head + pair, mask=inside, other=0.0)
    high = tl.load(head + half + pair, mask=inside, other=0.0)
    exact_low, exact_high = low.to(tl.float32), high.to(tl.float32)
    low_cosine = tl.load(cosines + own, mask=inside, other=0.0).to(tl.float32)
    high_cosine = tl.load(cosines + own + half, mask=inside, other=0.0).to(tl.float32)
    low_sine = tl.load(sines + own, mask=inside, other=0.0).to(tl.float32)
    high_sine = tl.load(sines + own + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(head + pair, (exact_low * low_cosine - exact_high * low_sine).to(low.dtype), mask=inside)
    tl.store(head + half + pair, (exact_high * high_cosine + exact_low * high_sine).to(low.dtype), mask=inside)
