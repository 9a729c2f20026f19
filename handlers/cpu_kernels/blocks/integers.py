"""The product of a row of bfloat16 and blocks of few bits in integers, where one instruction adds products of bytes.

The inputs of a block become integers of 16 bits, times a power of two of their own: those within a factor of 128 of the
greatest one stay as they are, smaller ones are rounded to 2 ** -15 of it. Products with stored numbers are then exact,
and take a third of the instructions that float32 takes. Numbers of 4 bits are multiplied as bytes, by the upper and by
the lower bytes of the inputs. So are those of 8 bits on Arm; AVX-512 multiplies them in 16 bits.

The power of two is at least 2 ** -109, which inputs are rounded to. An infinity or a NaN makes the sums of its row NaN.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from handlers.cpu_kernels import byte_products
from handlers.cpu_kernels.blocks.layout import GROUP, GROUPS, INPUTS, Kind
from handlers.cpu_kernels.blocks.reading import Block
from handlers.cpu_kernels.blocks.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    HALF,
    INT,
    PAIRS,
    WORD,
    WORDS,
    in_all_lanes,
    load_at,
    multiply_add,
    scaled,
    shuffled,
    store_at,
)
from handlers.cpu_kernels.byte_products import add_byte_products
from handlers.cpu_kernels.intrinsics import LANES, spread

IS_USABLE = byte_products.HAS_VNNI or byte_products.HAS_DOT_PRODUCT
PREPARED_BYTES, FLOATS_AT = 320, 192
"""Of the inputs of a block as `prepare` writes them, and where they are as float32 among these."""
WORDS_BYTES, SCALE_OF_WORDS_AT, SUM_OF_WORDS_AT = 72, 64, 68
"""Of the inputs of a block as `prepare_words` writes them, and where their scale and their sum are among these."""
_BYTES_AT, _SCALE_AT, _SUM_AT, _SUMS_OF_GROUPS_AT = 64, 128, 132, 136
_EXPONENT, _MIN_EXPONENT, _NAN = 0x7F800000, 32 << 23, 0x7FC00000
_LARGEST = 14  # the greatest integer of a block has this exponent

# As `Numbers.nibbles_of` has the numbers: for each group, and for the even and the odd pairs in it, the upper bytes of
# the first inputs of these, those of the second inputs, and then the lower bytes.
_NIBBLE_ORDER = [
    part * INPUTS + group * GROUP + 2 * pair + place
    for group in range(INPUTS // GROUP)
    for first in range(2)
    for part in (1, 0)
    for place in range(2)
    for pair in range(first, PAIRS, 2)
]

_INPUT_WORDS, _INPUT_HALVES = ir.VectorType(WORD, INPUTS), ir.VectorType(HALF, INPUTS)
_INPUT_FLOATS = ir.VectorType(FLOAT, INPUTS)


def multiplies(kind: Kind) -> bool:
    """Whether blocks of a kind are multiplied so."""
    has_instruction = kind.bits < 8 or byte_products.HAS_VNNI or byte_products.HAS_I8MM
    return has_instruction and not kind.has_codebook and not kind.has_quads


@intrinsic
def prepare(context, source, target):
    """Write what products take of a block's inputs: source, the address of INPUTS elements of bfloat16, to a target."""

    def build(ctx, builder, sig, args):
        source, target = args
        floats, rounded, scale = _as_integers(builder, source)
        if byte_products.HAS_VNNI:
            store_at(builder, builder.trunc(rounded, _INPUT_HALVES), target, 0)
        else:
            store_at(builder, _by_bytes(builder, rounded, [*range(INPUTS, 2 * INPUTS), *range(INPUTS)]), target, 0)
        store_at(builder, _by_bytes(builder, rounded, _NIBBLE_ORDER), target, _BYTES_AT)
        store_at(builder, scale, target, _SCALE_AT)
        store_at(builder, _reduced(builder, "add", rounded), target, _SUM_AT)
        for group in range(GROUPS):
            total = _reduced(builder, "add", _group_of(builder, rounded, group))
            store_at(builder, total, target, _SUMS_OF_GROUPS_AT + 4 * group)
        store_at(builder, floats, target, FLOATS_AT)
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.uintp), build


@intrinsic
def prepare_words(context, source, target):
    """Write what products in words take of a block's inputs, as `prepare` does; their sum is a float32."""

    def build(ctx, builder, sig, args):
        source, target = args
        _, rounded, scale = _as_integers(builder, source)
        store_at(builder, builder.trunc(rounded, _INPUT_HALVES), target, 0)
        store_at(builder, scale, target, SCALE_OF_WORDS_AT)
        store_at(builder, builder.sitofp(_reduced(builder, "add", rounded), FLOAT), target, SUM_OF_WORDS_AT)
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.uintp), build


def _as_integers(builder, source):
    """Return INPUTS elements of bfloat16 at an address as float32, as integers, and what these are to be scaled by."""
    bits = builder.shl(builder.zext(load_at(builder, source, 0, _INPUT_HALVES), _INPUT_WORDS), _constant(16))
    floats = builder.bitcast(bits, _INPUT_FLOATS)
    exponent = builder.and_(_reduced(builder, "umax", builder.and_(bits, _constant(0x7FFFFFFF))), WORD(_EXPONENT))
    is_tiny = builder.icmp_unsigned("<", exponent, WORD(_MIN_EXPONENT))
    kept = builder.select(is_tiny, WORD(_MIN_EXPONENT), exponent)
    factor = builder.sub(WORD((2 * 127 + _LARGEST) << 23), kept)
    factors = spread(builder, builder.bitcast(factor, FLOAT), _INPUT_FLOATS)
    rounded = _rounded(builder, builder.fmul(floats, factors))
    is_finite = builder.icmp_unsigned("<", exponent, WORD(_EXPONENT))
    scale = builder.select(is_finite, builder.sub(kept, WORD(_LARGEST << 23)), WORD(_NAN))
    return floats, rounded, scale


def _constant(number: int):
    return ir.Constant(_INPUT_WORDS, [number] * INPUTS)


def _reduced(builder, operation: str, words):
    name, kind = f"llvm.vector.reduce.{operation}.v{words.type.count}i32", ir.FunctionType(WORD, [words.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [words])


def _group_of(builder, words, group: int):
    return shuffled(builder, words, words, range(GROUP * group, GROUP * (group + 1)))


def _rounded(builder, floats):
    kind = ir.FunctionType(_INPUT_FLOATS, [_INPUT_FLOATS])
    nearest = cgutils.get_or_insert_function(builder.module, kind, f"llvm.rint.v{INPUTS}f32")
    return builder.fptosi(builder.call(nearest, [floats]), _INPUT_WORDS)


def _by_bytes(builder, words, order: Sequence[int]):
    """Return the lower bytes of integers, and behind them the upper ones, in an order."""
    lower = builder.trunc(words, ir.VectorType(BYTE, INPUTS))
    upper = builder.trunc(builder.ashr(words, _constant(8)), ir.VectorType(BYTE, INPUTS))
    return builder.shuffle_vector(lower, upper, ir.Constant(ir.VectorType(WORD, len(order)), list(order)))


def add_words(builder, *operands):
    """Return the first operand with the products of the words of 16 bits in the others: of pairs, with AVX-512 VNNI."""
    kind = ir.FunctionType(WORDS, [WORDS] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpwssd.512")
    return builder.call(function, operands)


class IntegerSums:
    """Adds the products of a row and a block to totals, one vector for each half of the outputs."""

    def __init__(self, builder, block: Block, totals) -> None:
        self._builder, self._block, self._totals = builder, block, totals

    def add(self, inputs) -> None:
        """Add those of the inputs that `prepare` has written to an address."""
        builder, block = self._builder, self._block
        scale = self._spread(inputs, _SCALE_AT, FLOAT, FLOATS)
        of_inputs = builder.sitofp(self._spread(inputs, _SUM_AT, WORD, WORDS), FLOATS)
        for groups in block.kind.scaled_groups:
            for half, (words, total) in enumerate(zip(self._sums(inputs, groups), self._totals, strict=True)):
                minima = builder.fneg(block.scales.minima_of_half(half)) if block.kind.has_minimum else None
                found = scaled(builder, words, block.scales.of_half(half, INT(groups[0])), minima, of_inputs)
                builder.store(multiply_add(builder, found, scale, builder.load(total)), total)

    def _sums(self, inputs, groups: Sequence[int]):
        """Return the sums of products in some groups, for both halves of the outputs."""
        if self._block.kind.bits < 8:
            return self._of_nibbles(inputs, groups)
        return self._of_words(inputs) if byte_products.HAS_VNNI else self._of_bytes(inputs)

    def _of_words(self, inputs):
        builder = self._builder
        sums = [cgutils.alloca_once(builder, WORDS) for _ in range(2)]
        for total in sums:
            builder.store(ir.Constant(WORDS, None), total)
        with cgutils.for_range(builder, INT(2)) as loop:
            begin = builder.add(inputs, builder.mul(loop.index, INT(2 * GROUP)))
            for pair in range(PAIRS):
                factor = self._spread(begin, 4 * pair, WORD, WORDS)
                for half, total in enumerate(sums):
                    numbers = builder.bitcast(self._block.numbers.bytes_of(loop.index, pair, half), WORDS)
                    builder.store(add_words(builder, builder.load(total), numbers, factor), total)
        return [builder.load(total) for total in sums]

    def _of_bytes(self, inputs):
        """Multiply the upper and the lower bytes of four inputs at once."""
        builder = self._builder
        uppers, lowers = ([cgutils.alloca_once(builder, WORDS) for _ in range(2)] for _ in range(2))
        for total in uppers + lowers:
            builder.store(ir.Constant(WORDS, None), total)
        with cgutils.for_range(builder, INT(2)) as loop:
            begin = builder.add(inputs, builder.mul(loop.index, INT(GROUP)))
            for pair in range(0, PAIRS, 2):
                upper, lower = (self._spread(begin, 2 * pair + place, WORD, WORDS) for place in (0, INPUTS))
                for half in range(2):
                    numbers = self._block.numbers.two_pairs_of(loop.index, pair, half)
                    of_upper = add_byte_products(builder, builder.load(uppers[half]), upper, numbers, "both")
                    of_lower = add_byte_products(builder, builder.load(lowers[half]), lower, numbers, "second")
                    builder.store(of_upper, uppers[half])
                    builder.store(of_lower, lowers[half])
        return [self._joined(*map(builder.load, pair)) for pair in zip(uppers, lowers, strict=True)]

    def _of_nibbles(self, inputs, groups: Sequence[int]):
        """Numbers are from 0 to 63, and so bytes with and without a sign."""
        builder, zero = self._builder, self._block.kind.zero
        sum_at = _SUM_AT if len(groups) == GROUPS else _SUMS_OF_GROUPS_AT + 4 * groups[0]
        less = builder.mul(self._spread(inputs, sum_at, WORD, WORDS), in_all_lanes(-zero))
        sums = []
        for half in range(2):
            one, other = (self._of_quarter(inputs, 2 * half + part, groups) for part in range(2))
            first, second = (shuffled(builder, one, other, range(place, 2 * LANES, 2)) for place in range(2))
            total = builder.add(first, second)
            sums.append(builder.add(total, less) if zero else total)
        return sums

    def _of_quarter(self, inputs, quarter: int, groups: Sequence[int]):
        builder = self._builder
        upper = lower = ir.Constant(WORDS, None)
        for group in groups:
            for part, numbers in enumerate(self._block.numbers.nibbles_of(INT(group), quarter)):
                offset = _BYTES_AT + 2 * GROUP * group + GROUP * part
                uppers, lowers = (self._spread_pair(inputs, offset + place) for place in (0, GROUP // 2))
                upper = add_byte_products(builder, upper, numbers, uppers, "both")
                lower = add_byte_products(builder, lower, lowers, numbers, "neither")
        return self._joined(upper, lower)

    def _joined(self, upper, lower):
        """Return the sums of products, given those of the upper and of the lower bytes of the inputs."""
        return self._builder.add(self._builder.shl(upper, in_all_lanes(8)), lower)

    def _spread(self, address, offset: int, kind, vector):
        return spread(self._builder, load_at(self._builder, address, offset, kind), vector)

    def _spread_pair(self, address, offset: int):
        pair = spread(self._builder, load_at(self._builder, address, offset, INT), ir.VectorType(INT, LANES // 2))
        return self._builder.bitcast(pair, WORDS)
