"""Triton kernels for the updates of LoRA adapters; each row has its own adapter (Punica, Chen et al., 2023)."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803 - Triton's constants are written in capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

_RANKS, _STEP, _OUTPUTS = 16, 512, 128  # of a program


@triton.jit
def _shrink(given, down, places, low, width, ranks, RANKS: tl.constexpr, STEP: tl.constexpr):
    """Multiply rows, (rows, width), by the matrices of their places, (places, ranks, width): `low` is (rows, ranks)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row).to(tl.int64)
    if place < 0:
        return
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    inside = rank < ranks
    sums = tl.zeros((RANKS, STEP), tl.float32)
    for start in range(0, width, STEP):
        column = start + tl.arange(0, STEP)
        mask = inside[:, None] & (column < width)[None, :]
        own = tl.load(down + (place * ranks + rank)[:, None] * width + column[None, :], mask=mask, other=0.0)
        states = tl.load(given + row * width + column, mask=column < width, other=0.0)
        sums += own.to(tl.float32) * states.to(tl.float32)[None, :]
    tl.store(low + row * ranks + rank, tl.sum(sums, 1), mask=inside)


@triton.jit
def _expand(low, up, places, output, stride, outputs, ranks, RANKS_PAD: tl.constexpr, OUTPUTS: tl.constexpr):
    """Add `low`, (rows, ranks), times the matrices of the places, (places, ranks, outputs), to rows of `output`."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row).to(tl.int64)
    if place < 0:
        return
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    rank = tl.arange(0, RANKS_PAD)
    mask = (rank < ranks)[:, None] & (column < outputs)[None, :]
    own = tl.load(up + (place * ranks + rank)[:, None] * outputs + column[None, :], mask=mask, other=0.0)
    factors = tl.load(low + row * ranks + rank, mask=rank < ranks, other=0.0)
    update = tl.sum(own.to(tl.float32) * factors[:, None], 0)
    target = output + row * stride + column
    before = tl.load(target, mask=column < outputs, other=0.0)
    tl.store(target, (before.to(tl.float32) + update).to(before.dtype), mask=column < outputs)


def add_updates_on_gpu(
    given: torch.Tensor, output: torch.Tensor, down: torch.Tensor, up: torch.Tensor, places: torch.Tensor
) -> None:
    """See `add_updates`. The columns of `output` are contiguous."""
    given = given.contiguous()
    count, (ranks, outputs), width = len(given), up.shape[1:], given.shape[1]
    assert output.stride(1) == 1, "rows of outputs are contiguous"
    low = given.new_empty((count, ranks), dtype=torch.float32)
    with torch.cuda.device_of(given):
        _shrink[(count, triton.cdiv(ranks, _RANKS))](given, down, places, low, width, ranks, RANKS=_RANKS, STEP=_STEP)
        _expand[(count, triton.cdiv(outputs, _OUTPUTS))](
            low, up, places, output, output.stride(0), outputs, ranks,
            RANKS_PAD=triton.next_power_of_2(ranks), OUTPUTS=_OUTPUTS,
        )  # fmt: skip
