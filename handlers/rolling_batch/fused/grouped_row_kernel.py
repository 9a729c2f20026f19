"""The kernel for a pass with one row, over weights of 4 or 8 bits with a scale for each group of inputs."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806 - Triton's constants are written in capitals

import triton
import triton.language as tl
from triton.language.extra import cuda as hopper

from handlers.checkpoints.grouped.kernels import float8, halves, whole
from handlers.rolling_batch.fused.one_row_kernel import finish, lines


@triton.jit
def _scales(
    scales, zeros, line, inside, chunk, chunks, groups,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, ZEROED: tl.constexpr,
):  # fmt: skip
    """Return the scales and zeros of chunks of inputs, (lines, chunks)."""
    known = inside[:, None] & (chunk < chunks)[None, :]
    of_group = line[:, None] * groups + (chunk * CHUNK // GROUP)[None, :]
    scale = tl.load(scales + of_group, mask=known, other=0.0)
    zero = tl.load(zeros + of_group, mask=known, other=0) if ZEROED else tl.full(known.shape, ZERO, tl.uint8)
    return scale, zero


@triton.jit
def _prefetch(weight, line, bytes_of_line):
    """Bring the first KiB of each line into the L2 cache."""
    place = tl.minimum(tl.arange(0, 8) * 128, bytes_of_line - 1)
    address = weight.to(tl.int64) + line[:, None] * bytes_of_line + place[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _given(row, scale, column, seen, SCALED: tl.constexpr):
    """Return activations at `column`, (chunks, PART) float32, times the norm's scale, and their squares."""
    given = tl.load(row + column, mask=seen, other=0.0).to(tl.float32)
    squares = given * given
    if SCALED:
        given *= tl.load(scale + column, mask=seen, other=0.0).to(tl.float32)
    return given, squares


@triton.jit
def grouped_row_kernel(
    row,
    scale,
    weight,
    scales,
    zeros,
    bias,
    residual,
    out,
    width,
    outputs,
    bytes_of_line,
    groups,
    epsilon,
    OUTPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    NATIVE: tl.constexpr,
    ZERO: tl.constexpr,
    ZEROED: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    CHAINED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Do what `linear_kernel` does, for a weight as few_rows_kernel takes it, in steps of CHUNKS chunks of inputs."""
    if CHAINED:
        hopper.gdc_launch_dependents()
    first, line, inside = lines(OUTPUTS, GATED, outputs)
    PART: tl.constexpr = CHUNK * BITS // 8
    chunks = width // CHUNK
    step = tl.arange(0, CHUNKS)
    sums = tl.zeros((line.shape[0], CHUNKS, PART), tl.float32)
    squares = tl.zeros((CHUNKS, PART), tl.float32)
    if CHAINED:  # the first weights come nearer while the launch before this one ends
        _prefetch(weight, tl.where(inside, line, 0), bytes_of_line)
        hopper.gdc_wait()
    by, zero = _scales(scales, zeros, line, inside, step, chunks, groups, CHUNK, GROUP, ZERO, ZEROED)
    for start in tl.range(0, chunks, CHUNKS, num_stages=STAGES):
        chunk = start + step
        place = chunk[:, None] * PART + tl.arange(0, PART)[None, :]
        packed = tl.load(
            weight + line[:, None, None] * bytes_of_line + place[None, :, :],
            mask=inside[:, None, None] & (chunk < chunks)[None, :, None],
            other=0,
            eviction_policy="evict_first",
        )
        # What the next step is scaled by is on its way during this one.
        next_by, next_zero = _scales(
            scales, zeros, line, inside, chunk + CHUNKS, chunks, groups, CHUNK, GROUP, ZERO, ZEROED
        )
        column = chunk[:, None] * CHUNK + tl.arange(0, PART)[None, :]
        seen = (chunk < chunks)[:, None] & (tl.arange(0, PART) < PART)[None, :]
        given, square = _given(row, scale, column, seen, SCALED)
        squares += square
        if FLOATS:
            products = float8(packed, NATIVE) * given[None, :, :]
        elif BITS == 4:
            low, high = halves(packed, zero.to(tl.float32)[:, :, None], tl.float16)
            above, square = _given(row, scale, column + CHUNK // 2, seen, SCALED)
            squares += square
            products = low.to(tl.float32) * given[None, :, :] + high.to(tl.float32) * above[None, :, :]
        else:
            products = whole(packed, zero.to(tl.float32)[:, :, None]) * given[None, :, :]
        sums += products * by.to(tl.float32)[:, :, None]
        by, zero = next_by, next_zero
    exact = tl.sum(tl.sum(sums, 2), 1)
    if SCALED:
        exact *= 1.0 / tl.sqrt(tl.sum(tl.sum(squares, 1), 0) / width + epsilon)
    finish(exact, bias, residual, out, first, line, inside, outputs, OUTPUTS, BIASED, GATED, ADDED)
