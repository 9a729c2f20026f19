"""Rows of a KV cache in 8 bits: a number for each element, and a scale for all of them.

A row, the key or value of one head and token, is its numbers and behind them the two bytes of its scale in bfloat16.
int8 rows hold integers from -127 to 127. uint8 rows hold numbers of 8 bits with 4 of exponent (E4M3 of Micikevicius et
al., "FP8 Formats for Deep Learning", 2022), at most 448. Numbers of both are exact in bfloat16: their
products are those of the kernels for bfloat16, and the scale of a token multiplies its score, or its weight.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from handlers.cpu_kernels.compilation.decorators import PART, kernel_part
from handlers.cpu_kernels.intrinsics import LANES, larger, load, store

GREATEST = {types.int8: 127.0, types.uint8: 448.0}
"""The greatest number of a row, by the type of its elements."""
_TINY = np.float32(1e-30)  # rows without a greater element become zeros: their scale would have no inverse

_INT, _WORD, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()


def is_packed(array):
    """Whether an array, by numba's type of it, has rows in 8 bits."""
    return array.dtype in GREATEST


@intrinsic
def number_of(context, element, like):
    """Return an element of a packed row, without its scale, as one of the type of `like`, bfloat16 or float32."""

    def build(ctx, builder, sig, args):
        return _numbers(builder, args[0], element == types.uint8, like == types.float32)

    return like(element, like), build


def _numbers(builder, elements, is_float, is_wide):
    """Return elements of packed rows, one or a vector, as float32 if it `is_wide`, else as bfloat16."""
    word, float_, half = (_like(kind, elements.type) for kind in (_WORD, _FLOAT, ir.IntType(16)))
    if is_float:
        bits = _bits_of_floats(builder, builder.zext(elements, word), word, float_)
    else:
        bits = builder.bitcast(builder.sitofp(builder.sext(elements, word), float_), word)
    if is_wide:
        return builder.bitcast(bits, float_)
    return builder.trunc(builder.lshr(bits, _constant(word, 16)), half)


def _bits_of_floats(builder, wide, word, float_):
    """Return numbers of 8 bits (E4M3), in words, as float32, in words."""
    magnitude = builder.and_(wide, _constant(word, 0x7F))
    # Exponents count from 7, and from 127.
    normal = builder.add(builder.shl(magnitude, _constant(word, 20)), _constant(word, 120 << 23))
    small = builder.fmul(builder.sitofp(magnitude, float_), _constant(float_, 2.0**-9))
    is_small = builder.icmp_signed("<", magnitude, _constant(word, 8))
    value = builder.select(is_small, builder.bitcast(small, word), normal)
    sign = builder.shl(builder.and_(wide, _constant(word, 0x80)), _constant(word, 24))
    return builder.or_(value, sign)


def _like(kind, other):
    return ir.VectorType(kind, other.count) if isinstance(other, ir.VectorType) else kind


def _constant(kind, number):
    return ir.Constant(kind, [number] * kind.count) if isinstance(kind, ir.VectorType) else kind(number)


@intrinsic
def _unpack_vectors(context, rows, first, count, numbers, vectors):
    """Write the numbers of `count` packed rows from `first` on to the rows of `numbers`: LANES for each of `vectors`.

    rows (n, dim and the scale), numbers (count, dim) of bfloat16 or float32. Nothing is checked.
    """
    is_float, is_wide = rows.dtype == types.uint8, numbers.dtype == types.float32
    packed = ir.VectorType(ir.IntType(8), LANES)
    unpacked = ir.VectorType(_FLOAT if is_wide else ir.IntType(16), LANES)
    size = 4 if is_wide else 2

    def build(ctx, builder, sig, args):
        source, target = (ctx.make_array(sig.args[place])(ctx, builder, args[place]) for place in (0, 3))
        steps = [builder.extract_value(array.strides, 0) for array in (source, target)]
        begin = builder.add(builder.ptrtoint(source.data, _INT), builder.mul(args[1], steps[0]))
        end = builder.ptrtoint(target.data, _INT)
        with cgutils.for_range(builder, args[2]) as row:
            places = [
                builder.add(at, builder.mul(row.index, step)) for at, step in zip((begin, end), steps, strict=True)
            ]
            with cgutils.for_range(builder, args[4]) as part:
                lanes = builder.mul(part.index, _INT(LANES))
                read = builder.inttoptr(builder.add(places[0], lanes), packed.as_pointer())
                found = _numbers(builder, builder.load(read, align=1), is_float, is_wide)
                written = builder.add(places[1], builder.mul(lanes, _INT(size)))
                builder.store(found, builder.inttoptr(written, unpacked.as_pointer()), align=size)
        return ctx.get_dummy_value()

    return types.void(rows, types.intp, types.intp, numbers, types.intp), build


@intrinsic
def _nearest(context, number, like):
    """Return a float32 as an element of a packed row of the type of `like`, rounded to nearest, ties to even.

    It is not above the greatest number by more than rounding.
    """

    def build(ctx, builder, sig, args):
        if like == types.int8:
            return builder.fptosi(_round(builder, args[0]), ir.IntType(8))
        bits = builder.bitcast(args[0], _WORD)
        magnitude = builder.and_(bits, _WORD(0x7FFFFFFF))
        odd = builder.and_(builder.lshr(magnitude, _WORD(20)), _WORD(1))
        kept = builder.lshr(builder.add(builder.add(magnitude, _WORD(0x7FFFF)), odd), _WORD(20))
        normal = builder.sub(kept, _WORD(120 << 3))
        scaled = builder.fmul(builder.bitcast(magnitude, _FLOAT), ir.Constant(_FLOAT, 512.0))
        small = builder.fptosi(_round(builder, scaled), _WORD)
        is_small = builder.icmp_unsigned("<", magnitude, _WORD(121 << 23))  # below 2 ** -6
        value = builder.select(is_small, small, normal)
        sign = builder.and_(builder.lshr(bits, _WORD(24)), _WORD(0x80))
        return builder.trunc(builder.or_(value, sign), ir.IntType(8))

    return like(types.float32, like), build


def _round(builder, number):
    kind = ir.FunctionType(_FLOAT, [_FLOAT])
    function = builder.module.globals.get("llvm.rint.f32") or ir.Function(builder.module, kind, "llvm.rint.f32")
    return builder.call(function, [number])


@intrinsic
def _scale_above(context, number):
    """Return the bits of the least bfloat16 that is not below a positive float32."""

    def build(ctx, builder, sig, args):
        bits = builder.add(builder.bitcast(args[0], _WORD), _WORD(0xFFFF))
        return builder.trunc(builder.lshr(bits, _WORD(16)), ir.IntType(16))

    return types.uint16(types.float32), build


@kernel_part()
def _scale_of(row, dim):
    return load(np.uint16(np.uint8(row[dim])) | np.uint16(np.uint16(np.uint8(row[dim + 1])) << np.uint16(8)))


@kernel_part()
def unpack(rows, first, last, numbers, scales):
    """Write the numbers of rows `first:last` to `numbers`, (n, dim) of bfloat16 or float32, and scales to `scales`."""
    dim = numbers.shape[1]
    vectors = dim // LANES
    _unpack_vectors(rows, first, last - first, numbers, vectors)
    for t in range(last - first):
        row, target = rows[first + t], numbers[t]
        for d in range(vectors * LANES, dim):
            target[d] = number_of(row[d], target[d])
        scales[t] = _scale_of(row, dim)


def write_row(row, source):
    """Write the key or value `source` of a head and token to its row of the cache."""


@overload(write_row, jit_options=PART)
def _write_row(row, source):
    if not is_packed(row):

        def copy(row, source):
            for d in range(len(row)):
                row[d] = source[d]

        return copy
    greatest = np.float32(GREATEST[row.dtype])

    def pack(row, source):
        dim, most, is_finite = len(source), np.float32(0), True
        for d in range(dim):
            number = abs(load(source[d]))
            most = larger(most, number)
            is_finite &= number < np.float32(np.inf)
        bits, factor = np.uint16(0), np.float32(0)
        if not is_finite:
            bits = np.uint16(0x7FC0)  # NaN: what attends to the row becomes NaN, as with rows of other types
        elif most >= _TINY:
            bits = _scale_above(most / greatest)
            factor = np.float32(1) / load(bits)
        for d in range(dim):
            row[d] = _nearest(load(source[d]) * factor if is_finite else np.float32(0), row[d])
        row[dim], row[dim + 1] = bits & np.uint16(255), bits >> np.uint16(8)

    return pack


def rows_of(cache, slot, head, first, last, room):
    """Return rows `first:last` of a slot and head, (n, dim) of the type of `room`.

    Rows in 8 bits are unpacked into `room`, times their scales, and rounded to its type.
    """


@overload(rows_of, jit_options=PART)
def _rows_of(cache, slot, head, first, last, room):
    if not is_packed(cache):
        return lambda cache, slot, head, first, last, room: cache[slot, head, first:last]

    def unpacked(cache, slot, head, first, last, room):
        dim, found = room.shape[1], room[: last - first]
        for t in range(last - first):
            row, target = cache[slot, head, first + t], found[t]
            scale = _scale_of(row, dim)
            for d in range(dim):
                target[d] = store(number_of(row[d], scale) * scale, target[d])
        return found

    return unpacked
