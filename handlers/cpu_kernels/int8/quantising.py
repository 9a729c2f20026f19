"""Rounds activations to 8 bits with a scale in float32, the greatest magnitude over 127: of 32 inputs, or of a row.

Four inputs that a lane of a product adds up are a quad. Quad 4 * g + q of a block has inputs q, q + 4, q + 8 and q + 12
of group g, which is the order that numbers of 4 bits have in their words (see ../blocks/layout.py).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from handlers.cpu_kernels.blocks.layout import GROUP, INPUTS, Q8_TILES, QUADS, Kind
from handlers.cpu_kernels.blocks.vectors import BYTE, FLOAT, HALF, INT, WORD, load_at, store_at
from handlers.cpu_kernels.intrinsics import spread

QUANTISED_BYTES = 64
"""Of the inputs of a block as `quantise` writes them: a line of the caches."""
SCALE_AT, SUM_AT = 32, 36
"""Where the scale is among them, and the sum of the numbers as float32."""
# Where the sum of the numbers is, times what stored numbers of a kind are greater by than what they stand for. A sum of
# products begins with it, so that nothing has to be subtracted from these.
_BEGINS = {0: 40, -8: 44, -128: 48}
_BEGINS_OF_GROUPS, _FACTOR_OF_GROUPS = 52, -32

_GREATEST = 127.0
_MIN = 2.0**-100  # below it, the inverse of a scale would be infinite
_INFINITY, _NAN = 0x7F800000, 0x7FC00000
# The lowest bits of a float32 of this size are an integer. Adding it rounds to nearest, and a byte of it has the sign.
_SHIFT, _SHIFT_BITS = 1.5 * 2**23, 0x4B400000

_ORDER = [GROUP * group + quad + QUADS * place for group in range(2) for quad in range(QUADS) for place in range(4)]
_INPUT_WORDS, _INPUT_FLOATS = ir.VectorType(WORD, INPUTS), ir.VectorType(FLOAT, INPUTS)


def begin_at(kind: Kind, group: int) -> int:
    """Return where the word is that the sums of a block begin with: those of a group, if groups have scales."""
    if kind.scales == 1:
        return _BEGINS[-kind.zero]
    assert kind.zero == -_FACTOR_OF_GROUPS
    return _BEGINS_OF_GROUPS + 4 * group


@intrinsic
def quantise(context, source, target, like):
    """Write a block's inputs in 8 bits: source, the address of INPUTS elements of the type of `like`, to a target.

    An infinity or a NaN makes the scale, and so all sums of its row, NaN.
    """

    def build(ctx, builder, sig, args):
        source, target, _ = args
        bits = _bits_at(builder, source, like)
        inverse, scale = _scaling(builder, _reduced(builder, "umax", _magnitudes(builder, bits)))
        words = _rounded(builder, bits, inverse)
        _store_numbers(builder, words, target)
        groups = [_reduced(builder, "add", part) for part in _by_group(builder, words)]
        total = builder.add(*groups)
        store_at(builder, scale, target, SCALE_AT)
        store_at(builder, builder.sitofp(total, FLOAT), target, SUM_AT)
        for factor, place in _BEGINS.items():
            store_at(builder, builder.mul(total, WORD(factor)), target, place)
        for group, sum_of_group in enumerate(groups):
            begin = builder.mul(sum_of_group, WORD(_FACTOR_OF_GROUPS))
            store_at(builder, begin, target, _BEGINS_OF_GROUPS + 4 * group)
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.uintp, like), build


@intrinsic
def quantise_row(context, source, blocks, target, like):
    """Write a row in 8 bits, as `quantise` does for a block: INPUTS bytes for each of its blocks.

    Return the scale, which an infinity or a NaN makes NaN, and what the sum of the row's products with numbers of
    Q8_TILES begins with (int32).
    """

    def build(ctx, builder, sig, args):
        source, blocks, target, _ = args
        size = INPUTS * (4 if like == types.float32 else 2)

        def bits_of(block):
            return _bits_at(builder, builder.add(source, builder.mul(block, INT(size))), like)

        greatest, total = (cgutils.alloca_once(builder, _INPUT_WORDS) for _ in range(2))
        for vector in (greatest, total):
            builder.store(_in_all(0), vector)
        with cgutils.for_range(builder, blocks) as loop:
            found, before = _magnitudes(builder, bits_of(loop.index)), builder.load(greatest)
            is_greater = builder.icmp_unsigned(">", found, before)
            builder.store(builder.select(is_greater, found, before), greatest)
        inverse, scale = _scaling(builder, _reduced(builder, "umax", builder.load(greatest)))
        with cgutils.for_range(builder, blocks) as loop:
            words = _rounded(builder, bits_of(loop.index), inverse)
            _store_numbers(builder, words, builder.add(target, builder.mul(loop.index, INT(INPUTS))))
            builder.store(builder.add(builder.load(total), words), total)
        begin = builder.mul(_reduced(builder, "add", builder.load(total)), WORD(-Q8_TILES.zero))
        return ctx.make_tuple(builder, sig.return_type, (scale, begin))

    found = types.Tuple((types.float32, types.int32))
    return found(types.uintp, types.intp, types.uintp, like), build


def _magnitudes(builder, bits):
    return builder.and_(bits, _in_all(0x7FFFFFFF))


def _scaling(builder, largest):
    """Return the inverse of a scale in all lanes, and the scale, for the bits of the greatest magnitude."""
    greatest = builder.bitcast(largest, FLOAT)
    greatest = builder.select(builder.fcmp_ordered(">", greatest, FLOAT(_MIN)), greatest, FLOAT(_MIN))
    inverse = spread(builder, builder.fdiv(FLOAT(_GREATEST), greatest), _INPUT_FLOATS)
    is_finite = builder.icmp_unsigned("<", largest, WORD(_INFINITY))
    scale = builder.fdiv(greatest, FLOAT(_GREATEST))
    return inverse, builder.select(is_finite, scale, builder.bitcast(WORD(_NAN), FLOAT))


def _rounded(builder, bits, inverse):
    """Return the numbers that stand for the float32 of some bits, as words."""
    shift = ir.Constant(_INPUT_FLOATS, [_SHIFT] * INPUTS)
    shifted = builder.fadd(builder.fmul(builder.bitcast(bits, _INPUT_FLOATS), inverse), shift)
    return builder.sub(builder.bitcast(shifted, _INPUT_WORDS), _in_all(_SHIFT_BITS))


def _store_numbers(builder, words, target) -> None:
    """Write the numbers of a block as bytes, in quads."""
    in_order = builder.shuffle_vector(words, words, ir.Constant(_INPUT_WORDS, _ORDER))
    store_at(builder, builder.trunc(in_order, ir.VectorType(BYTE, INPUTS)), target, 0)


def _bits_at(builder, source, like):
    """Return the bits of float32."""
    if like == types.float32:
        return load_at(builder, source, 0, _INPUT_WORDS)
    stored = load_at(builder, source, 0, ir.VectorType(HALF, INPUTS))
    return builder.shl(builder.zext(stored, _INPUT_WORDS), _in_all(16))


def _in_all(number: int):
    return ir.Constant(_INPUT_WORDS, [number] * INPUTS)


def _by_group(builder, words):
    for group in range(INPUTS // GROUP):
        places = list(range(GROUP * group, GROUP * (group + 1)))
        yield builder.shuffle_vector(words, words, ir.Constant(ir.VectorType(WORD, GROUP), places))


def _reduced(builder, operation: str, words):
    name, kind = f"llvm.vector.reduce.{operation}.v{words.type.count}i32", ir.FunctionType(WORD, [words.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [words])
