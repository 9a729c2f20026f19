"""What lies between the projections of a decoder layer and its attention over pages: rotation, and the KV cache."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803 - Triton's constants are written in capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as hopper

from handlers.rolling_batch.pages.launch import PageLayer, chain_options


@triton.jit
def rotate_and_write_kernel(
    projected,
    cosines,
    sines,
    key_pages,
    value_pages,
    tables,
    slots,
    positions,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Rotate queries and keys of `projected`, (rows, HEADS + 2 * KV_HEADS, 2 * HALF), in place, and fill the KV cache.

    Keys and values are written to the pages of their slots. The halves of a head form the pairs. `cosines` and `sines`
    are (rows, 2 * HALF). Grid: (rows, HEADS + 2 * KV_HEADS).
    """
    if CHAINED:
        hopper.gdc_launch_dependents()
        hopper.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, HALF_PAD)
    inside = pair < HALF
    states = projected + (row * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF
    low = tl.load(states + pair, mask=inside, other=0.0)
    high = tl.load(states + HALF + pair, mask=inside, other=0.0)
    kept = key_pages
    own_head = head - HEADS
    if head < HEADS + KV_HEADS:
        angle = row * 2 * HALF + pair
        exact_low, exact_high = low.to(tl.float32), high.to(tl.float32)
        low_cosine = tl.load(cosines + angle, mask=inside, other=0.0).to(tl.float32)
        high_cosine = tl.load(cosines + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        low_sine = tl.load(sines + angle, mask=inside, other=0.0).to(tl.float32)
        high_sine = tl.load(sines + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        low = (exact_low * low_cosine - exact_high * low_sine).to(low.dtype)
        high = (exact_high * high_cosine + exact_low * high_sine).to(high.dtype)
        tl.store(states + pair, low, mask=inside)
        tl.store(states + HALF + pair, high, mask=inside)
    else:
        kept = value_pages
        own_head -= KV_HEADS
    if head >= HEADS:
        position = tl.load(positions + row)
        table = tables + tl.load(slots + row).to(tl.int64) * table_stride
        page = tl.load(table + position // PAGE).to(tl.int64)
        target = kept + ((page * KV_HEADS + own_head) * PAGE + position % PAGE) * 2 * HALF
        tl.store(target + pair, low, mask=inside)
        tl.store(target + HALF + pair, high, mask=inside)


def rotate_and_write(
    projected: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    layer: PageLayer,
    chained: bool = False,
) -> None:
    """Launch `rotate_and_write_kernel` for contiguous rows of tokens at `positions` of `slots`, (rows,) each."""
    if len(projected):
        half = layer.dim // 2
        grid = (len(projected), layer.heads + 2 * layer.kv_heads)
        rotate_and_write_kernel[grid](
            projected, cosines, sines, key_pages, value_pages, tables, slots, positions, tables.stride(0),
            HEADS=layer.heads, KV_HEADS=layer.kv_heads, HALF=half, HALF_PAD=triton.next_power_of_2(half),
            PAGE=layer.page, CHAINED=chained, num_warps=1, **chain_options(chained),
        )  # fmt: skip
