"""Products of rows of activations and unpacked blocks (see layout.py): numbers are multiplied, sums of a block scaled.

So weights are not rounded at all: small integers are exact in bfloat16, and scales multiply sums in float32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from handlers.cpu_kernels.blocks.layout import INPUTS, OUTPUTS
from handlers.cpu_kernels.blocks.unpacking import load_at, store_at
from handlers.cpu_kernels.intrinsics import LANES, TILE_ROWS, host_has, multiply_add, spread

_INT = ir.IntType(64)
_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
_LINE = 4 * OUTPUTS
# Outputs whose sums are in registers: see TILE_COLUMNS.
_PART = OUTPUTS if host_has("avx512f") else LANES


@intrinsic
def address_of(context, array):
    """Return the address of an array's first element."""

    def build(ctx, builder, sig, args):
        return builder.ptrtoint(ctx.make_array(sig.args[0])(ctx, builder, args[0]).data, _INT)

    return types.uintp(array), build


@intrinsic
def add_block_products(context, left, stride, blocks, right, scales, totals, like):
    """Add the scaled products of TILE_ROWS rows and some blocks to `totals`, TILE_ROWS x OUTPUTS float32.

    All are addresses: left of the first word of the first block in the first row, whose next one is `stride` bytes
    further; right of as many words of each output as `unpack_eight` writes; scales of a float32 of each output for each
    block. Words hold elements of the type of `like`. Vector registers multiply.
    """
    words = INPUTS if like == types.float32 else INPUTS // 2

    def build(ctx, builder, sig, args):
        left, stride, blocks, right, scales, totals, _ = args
        lefts = [builder.add(left, builder.mul(stride, _INT(row))) for row in range(TILE_ROWS)]
        for first in range(0, OUTPUTS, _PART):
            parts = range(first, first + _PART, LANES)
            with cgutils.for_range(builder, blocks) as loop:
                begin = builder.mul(loop.index, _INT(4 * words))
                sums = [[cgutils.alloca_once(builder, _FLOATS) for _ in parts] for _ in lefts]
                for total in (total for row in sums for total in row):
                    builder.store(ir.Constant(_FLOATS, None), total)
                block = builder.add(right, builder.mul(loop.index, _INT(words * _LINE)))
                with cgutils.for_range(builder, _INT(words)) as inner:
                    line = builder.add(block, builder.mul(inner.index, _INT(_LINE)))
                    vectors = [load_at(builder, line, 4 * part, _WORDS) for part in parts]
                    across = builder.add(begin, builder.mul(inner.index, _INT(4)))
                    for row, of_row in zip(lefts, sums, strict=True):
                        factor = spread(builder, load_at(builder, builder.add(row, across), 0, ir.IntType(32)), _WORDS)
                        for total, vector in zip(of_row, vectors, strict=True):
                            builder.store(multiply_add(builder, factor, vector, builder.load(total), like), total)
                line = builder.add(scales, builder.mul(loop.index, _INT(_LINE)))
                for part, of_part in zip(parts, zip(*sums, strict=True), strict=True):
                    scale = load_at(builder, line, 4 * part, _FLOATS)
                    for row, total in enumerate(of_part):
                        place = row * _LINE + 4 * part
                        added = multiply_add_floats(
                            builder, builder.load(total), scale, load_at(builder, totals, place, _FLOATS)
                        )
                        store_at(builder, added, totals, place)
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.intp, types.intp, types.uintp, types.uintp, types.uintp, like), build


@intrinsic
def add_scaled(context, sums, blocks, scales, rows, totals):
    """Add sums, blocks x rows x OUTPUTS, scaled, to `totals`, rows x OUTPUTS: all are addresses of float32."""

    def build(ctx, builder, sig, args):
        sums, blocks, scales, rows, totals = args
        distance = builder.mul(rows, _INT(_LINE))
        with cgutils.for_range(builder, rows) as loop:
            line = builder.mul(loop.index, _INT(_LINE))
            target = builder.add(totals, line)
            parts = range(0, OUTPUTS, LANES)
            kept = [cgutils.alloca_once_value(builder, load_at(builder, target, 4 * part, _FLOATS)) for part in parts]
            with cgutils.for_range(builder, blocks) as inner:
                of_block = builder.add(builder.add(sums, line), builder.mul(inner.index, distance))
                scale_line = builder.add(scales, builder.mul(inner.index, _INT(_LINE)))
                for part, total in zip(parts, kept, strict=True):
                    of_part, scale = (load_at(builder, base, 4 * part, _FLOATS) for base in (of_block, scale_line))
                    builder.store(multiply_add_floats(builder, of_part, scale, builder.load(total)), total)
            for part, total in zip(parts, kept, strict=True):
                store_at(builder, builder.load(total), target, 4 * part)
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.intp, types.uintp, types.intp, types.uintp), build


@intrinsic
def subtract_minima(context, minima, blocks, input_sums, distance, rows, totals):
    """Subtract minima, blocks x OUTPUTS, times the sums of the inputs of each block and row, from `totals`.

    All are addresses of float32. The sums of the next row are `distance` bytes further, totals are rows x OUTPUTS.
    """

    def build(ctx, builder, sig, args):
        minima, blocks, input_sums, distance, rows, totals = args
        with cgutils.for_range(builder, rows) as loop:
            target = builder.add(totals, builder.mul(loop.index, _INT(_LINE)))
            of_row = builder.add(input_sums, builder.mul(loop.index, distance))
            parts = range(0, OUTPUTS, LANES)
            kept = [cgutils.alloca_once_value(builder, load_at(builder, target, 4 * part, _FLOATS)) for part in parts]
            with cgutils.for_range(builder, blocks) as inner:
                place = builder.add(of_row, builder.mul(inner.index, _INT(4)))
                factor = spread(builder, builder.fneg(load_at(builder, place, 0, ir.FloatType())), _FLOATS)
                line = builder.add(minima, builder.mul(inner.index, _INT(_LINE)))
                for part, total in zip(parts, kept, strict=True):
                    less = load_at(builder, line, 4 * part, _FLOATS)
                    builder.store(multiply_add_floats(builder, less, factor, builder.load(total)), total)
            for part, total in zip(parts, kept, strict=True):
                store_at(builder, builder.load(total), target, 4 * part)
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.intp, types.uintp, types.intp, types.intp, types.uintp), build


def multiply_add_floats(builder, one, other, total):
    """Return `one * other + total`, rounded once where the processor can."""
    product = builder.fmul(one, other, flags=("contract",))
    return builder.fadd(product, total, flags=("contract",))
