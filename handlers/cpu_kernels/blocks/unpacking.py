"""Turns blocks of few bits (see layout.py) into the numbers that the kernels multiply."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

import struct

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from handlers.cpu_kernels.blocks.layout import INPUTS, OUTPUTS
from handlers.cpu_kernels.intrinsics import LANES, BFloat16, host_has, prefetch_line

_INT, _WORD, _HALF = ir.IntType(64), ir.IntType(32), ir.IntType(16)
_WORDS = ir.VectorType(_WORD, LANES)
_HALVES = ir.VectorType(_HALF, 2 * LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_LINE = 4 * OUTPUTS  # bytes of one word, or float32, of each output of a block
# As in amx.py: without it, products of one row take half as long again. One line is asked for with each that is read.
AHEAD_BYTES = 8192
_HAS_TABLES = host_has("avx512bw")
"""Whether one instruction looks 32 numbers up in a table."""


@intrinsic
def unpack_eight(context, source, blocks, stride, target, like):
    """Write the numbers of 8 bits of `blocks` blocks, which are `stride` bytes apart, from the address `source` on.

    They go to the address `target` in words of the type of `like`, as `word` makes them: for each block, for each word,
    one of each output. In a block the bytes of input 0 come first, one for each output.
    """

    def build(ctx, builder, sig, args):
        with cgutils.for_range(builder, args[1]) as loop:
            block = builder.add(args[0], builder.mul(loop.index, args[2]))
            out = builder.add(args[3], builder.mul(loop.index, _INT(_bytes_of(like))))
            for pair in range(INPUTS // 2):
                prefetch_line(builder, builder.add(block, _INT(AHEAD_BYTES + 2 * pair * OUTPUTS)))
                for part in range(0, OUTPUTS, LANES):
                    both = [widened(builder, block, (2 * pair + place) * OUTPUTS + part) for place in range(2)]
                    _put(builder, both, out, pair, part, like)
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.intp, types.intp, types.uintp, like), build


@intrinsic
def unpack_four(context, source, blocks, stride, zero, target, like):
    """Write the numbers of 4 bits of some blocks, less `zero`, which is 0 or 8; else as `unpack_eight` does.

    Word w of an output has inputs 8 * w to 8 * w + 7: those with even numbers in its lower half, the others above.
    """

    def build(ctx, builder, sig, args):
        table = None
        if _HAS_TABLES and like != types.float32:
            is_zero = builder.icmp_signed("==", args[3], _INT(0))
            table = builder.select(is_zero, _table(0), _table(8))
        less = builder.trunc(args[3], _WORD)
        with cgutils.for_range(builder, args[1]) as loop:
            block = builder.add(args[0], builder.mul(loop.index, args[2]))
            out = builder.add(args[4], builder.mul(loop.index, _INT(_bytes_of(like))))
            for group in range(INPUTS // 8):
                for part in range(0, OUTPUTS, LANES):
                    prefetch_line(builder, builder.add(block, _INT(AHEAD_BYTES + group * _LINE + 4 * part)))
                    packed = load_at(builder, block, group * _LINE + 4 * part, _WORDS)
                    for place in range(4):
                        pair = 4 * group + place
                        if table is not None:
                            found = _look_up(builder, table, _right(builder, packed, 4 * place))
                            store_at(builder, found, out, pair * _LINE + 4 * part)
                            continue
                        both = [_number(builder, packed, shift, 15, less) for shift in (4 * place, 4 * place + 16)]
                        _put(builder, both, out, pair, part, like)
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.intp, types.intp, types.intp, types.uintp, like), build


@intrinsic
def widen_halves(context, source, blocks, stride, target):
    """Write the float16 of each output of `blocks` blocks, `stride` bytes apart from `source` on, as float32."""

    def build(ctx, builder, sig, args):
        with cgutils.for_range(builder, args[1]) as loop:
            line = builder.add(args[0], builder.mul(loop.index, args[2]))
            out = builder.add(args[3], builder.mul(loop.index, _INT(_LINE)))
            for part in range(0, OUTPUTS, LANES):
                halves = load_at(builder, line, 2 * part, ir.VectorType(ir.HalfType(), LANES))
                store_at(builder, builder.fpext(halves, _FLOATS), out, 4 * part)
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.intp, types.intp, types.uintp), build


@intrinsic
def scale_words(context, words, blocks, scales, minima, target):
    """Write weights in bfloat16, rounded to nearest, for words that hold numbers in bfloat16: scaled, less a minimum.

    All are addresses: words and target have INPUTS / 2 words of two numbers for each output of each block, scales and
    minima a float32; `minima` is 0 if there are none. For processors that convert to bfloat16.
    """

    def build(ctx, builder, sig, args):
        words, blocks, scales, minima, target = args
        has_minima = builder.icmp_unsigned("!=", minima, _INT(0))
        with builder.if_else(has_minima) as (then, otherwise):
            with then:
                _scale_words(builder, words, blocks, scales, minima, target)
            with otherwise:
                _scale_words(builder, words, blocks, scales, None, target)
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.intp, types.uintp, types.uintp, types.uintp), build


def _scale_words(builder, words, blocks, scales, minima, target):
    with cgutils.for_range(builder, blocks) as loop:
        line = builder.mul(loop.index, _INT(_LINE))
        first = builder.mul(loop.index, _INT(_LINE * INPUTS // 2))
        of_words, out = builder.add(words, first), builder.add(target, first)
        for part in range(0, OUTPUTS, LANES):
            scale = load_at(builder, builder.add(scales, line), 4 * part, _FLOATS)
            less = None if minima is None else load_at(builder, builder.add(minima, line), 4 * part, _FLOATS)
            for pair in range(INPUTS // 2):
                packed = load_at(builder, of_words, pair * _LINE + 4 * part, _WORDS)
                low = builder.shl(packed, _all(16))
                high = builder.and_(packed, _all(0xFFFF0000))
                both = []
                for number in (low, high):
                    weight = builder.fmul(builder.bitcast(number, _FLOATS), scale)
                    both.append(weight if less is None else builder.fsub(weight, less, flags=("contract",)))
                store_at(builder, _rounded(builder, *both), out, pair * _LINE + 4 * part)


def _rounded(builder, low, high):
    """Return two vectors of float32 as one of words of bfloat16."""
    name, kind = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(BFloat16(), 2 * LANES)
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, (_FLOATS, _FLOATS)), name)
    halves = builder.bitcast(builder.call(function, (high, low)), _HALVES)  # the first operand becomes the upper half
    order = [place for lane in range(LANES) for place in (lane, lane + LANES)]
    return builder.bitcast(_shuffled(builder, halves, halves, order), _WORDS)


def load_at(builder, address, offset, kind):
    """Return the vector at an address and some bytes."""
    place = builder.inttoptr(builder.add(address, _INT(offset)), kind.as_pointer())
    return builder.load(place, align=1)


def store_at(builder, vector, address, offset):
    place = builder.inttoptr(builder.add(address, _INT(offset)), vector.type.as_pointer())
    builder.store(vector, place, align=4)


def _bytes_of(like):
    """Return how many bytes the words of a block take."""
    return _LINE * (INPUTS if like == types.float32 else INPUTS // 2)


def _all(number):
    return ir.Constant(_WORDS, [number] * LANES)


def _right(builder, vector, shift):
    return vector if shift == 0 else builder.lshr(vector, _all(shift))


def widened(builder, address, offset):
    """Return LANES signed bytes as float32."""
    small = load_at(builder, address, offset, ir.VectorType(ir.IntType(8), LANES))
    return builder.sitofp(builder.sext(small, _WORDS), _FLOATS)


def _number(builder, packed, shift, mask, less):
    """Return some bits of each lane, less a number, as float32."""
    bits = builder.and_(_right(builder, packed, shift), _all(mask))
    undefined, lanes = ir.Constant(_WORDS, ir.Undefined), ir.Constant(_WORDS, None)
    spread = builder.shuffle_vector(builder.insert_element(undefined, less, _WORD(0)), undefined, lanes)
    return builder.sitofp(builder.sub(bits, spread), _FLOATS)


def _put(builder, both, out, pair, part, like):
    """Write the numbers of two neighbouring inputs, which bfloat16 holds exactly: the upper half of a float32."""
    if like == types.float32:
        for place, floats in enumerate(both):
            store_at(builder, floats, out, (2 * pair + place) * _LINE + 4 * part)
        return
    low, high = (builder.bitcast(floats, _HALVES) for floats in both)
    order = [place for lane in range(LANES) for place in (2 * lane + 1, 2 * lane + 1 + 2 * LANES)]
    words = builder.bitcast(_shuffled(builder, low, high, order), _WORDS)
    store_at(builder, words, out, pair * _LINE + 4 * part)


def _shuffled(builder, one, other, order):
    kind = ir.VectorType(_WORD, len(order))
    return builder.shuffle_vector(one, other, ir.Constant(kind, order))


def _table(zero):
    """Return 32 numbers of bfloat16 for `_look_up`; the upper half repeats the lower one: the fifth bit is ignored."""
    return ir.Constant(_HALVES, [_bfloat16(number % 16 - zero) for number in range(2 * LANES)])


def _bfloat16(number):
    """Return the bits of a small integer in bfloat16."""
    return int.from_bytes(struct.pack("<f", number), "little") >> 16


def _look_up(builder, table, packed):
    """Return what a table has for the lowest five bits of each half of a word."""
    kind = ir.FunctionType(_HALVES, (_HALVES, _HALVES))
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.hi.512")
    return builder.bitcast(builder.call(function, (table, builder.bitcast(packed, _HALVES))), _WORDS)
