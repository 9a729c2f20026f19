"""Reads blocks of few bits (see layout.py) in a kernel that is being built: numbers, scales and minima as float32.

A vector has pairs of neighbouring inputs in 8 outputs, one output after the other, which is what one instruction makes
words of bfloat16 of. A quarter is 8 of the 32 outputs.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba.core import cgutils

from handlers.cpu_kernels.blocks.layout import GROUP, INPUTS, KINDS, OUTPUTS
from handlers.cpu_kernels.intrinsics import LANES, host_has, prefetch_line, spread

PAIRS, QUARTERS = GROUP // 2, 4
"""How many pairs of inputs a group has, and how many quarters the outputs."""
INT, WORD, FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
WORDS, FLOATS = ir.VectorType(WORD, LANES), ir.VectorType(FLOAT, LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_OF_QUARTER = OUTPUTS // QUARTERS
_VECTOR = 4 * LANES  # bytes
# As in amx.py: without it, products of one row take half as long again. One line is asked for with each that is read.
_AHEAD_BYTES = 8192
HAS_TABLES = host_has("avx512f")
"""Whether one instruction looks 16 numbers up in a table of float32. Without it no codebook is read."""


def for_kind(builder, code, build) -> None:
    """Write `build(kind)` for each kind; the one with `code` runs."""
    for kind in KINDS if HAS_TABLES else [kind for kind in KINDS if not kind.has_codebook]:
        with builder.if_then(builder.icmp_signed("==", code, INT(kind.code))):
            build(kind)


def block_at(builder, kind, panel, number) -> Block:
    """Return a block of the panel at an address, by its number, which is known at run time."""
    before, inside = (getattr(builder, name)(number, INT(kind.blocks)) for name in ("udiv", "urem"))
    first = builder.add(panel, INT(kind.codebook_bytes))
    factors = builder.add(first, builder.mul(before, INT(kind.super_bytes)))
    behind = builder.add(INT(kind.factor_bytes), builder.mul(inside, INT(kind.block_bytes)))
    return Block(builder, kind, factors, builder.add(factors, behind), panel)


class Block:
    """A block at an address, whose factors and codebook, if it has any, are at others."""

    def __init__(self, builder, kind, factors, address, codebook) -> None:
        self.kind = kind
        self._builder, self._factors, self._address, self._codebook = builder, factors, address, codebook

    def scales(self, quarter: int, group) -> ir.Value:
        """Return the scales of a quarter, each twice; `group` is a number that is known at run time."""
        size = OUTPUTS * self.kind.scale_bytes
        begin = self._address
        if self.kind.scales > 1:
            begin = self._builder.add(begin, self._builder.mul(group, INT(size)))
        return self._twice(self._scaled(begin, self._factors, quarter))

    def scales_of_half(self, half: int) -> ir.Value:
        """Return the scales of half the outputs, if the block has one for each."""
        return self._joined(self._scaled(self._address, self._factors, quarter) for quarter in (2 * half, 2 * half + 1))

    def minima(self, quarter: int) -> ir.Value:
        """Return the minima of a quarter, each twice, with the sign changed."""
        return self._builder.fneg(self._twice(self._minima_of(quarter)))

    def minima_of_half(self, half: int) -> ir.Value:
        """Return the minima of half the outputs."""
        return self._joined(map(self._minima_of, (2 * half, 2 * half + 1)))

    def _minima_of(self, quarter: int):
        address = self._builder.add(self._address, INT(OUTPUTS * self.kind.scale_bytes * self.kind.scales))
        factors = self._address if self.kind.has_zeros else self._builder.add(self._factors, INT(2 * OUTPUTS))
        if self.kind.minimum_bytes == 1:
            return self._multiplied(address, factors, quarter)
        return self._halves(address, quarter)

    def bytes_of(self, group, pair: int, half: int) -> ir.Value:
        """Return the inputs of a pair in half the outputs, of 8 bits, as words of 16 bits."""
        size, offset = GROUP * OUTPUTS, _VECTOR * pair + 2 * LANES * half
        address = self._builder.add(self._numbers(), self._builder.mul(group, INT(size)))
        if half == 0:
            self._prefetch(address, offset)
        found = load_at(self._builder, address, offset, ir.VectorType(ir.IntType(8), 2 * LANES))
        return self._builder.sext(found, ir.VectorType(ir.IntType(16), 2 * LANES))

    def nibbles_of(self, group, quarter: int) -> tuple[ir.Value, ir.Value]:
        """Return the numbers of a quarter, of 4 bits, as bytes: of pairs 0, 2, 4 and 6, and of the others."""
        builder = self._builder
        address = builder.add(self._numbers(), builder.mul(group, INT(GROUP * OUTPUTS // 2)))
        found, lower = self._line(address, _VECTOR * quarter), _all(0x0F0F0F0F)
        return builder.and_(found, lower), builder.and_(builder.lshr(found, _all(4)), lower)

    def _numbers(self):
        return self._builder.add(self._address, INT(self.kind.numbers_at))

    def pairs(self, group):
        """Return a function: a pair of a group, which is a number that is known at run time -> numbers of quarters."""
        builder, kind, quarters = self._builder, self.kind, range(QUARTERS)
        size = GROUP * OUTPUTS * kind.low_bits // 8
        low = builder.add(self._address, builder.add(INT(kind.numbers_at), builder.mul(group, INT(size))))
        if kind.low_bits == 8:
            return lambda pair: [self._widened(low, _VECTOR * pair + LANES * quarter) for quarter in quarters]
        lows = [self._line(low, _VECTOR * quarter) for quarter in quarters]
        if kind.bits == 4:
            table = self._table()
            return lambda pair: [self._number(self._right(word, 4 * pair), table) for word in lows]
        high = builder.add(self._address, INT(kind.numbers_at + 2 * size))
        shift = spread(builder, builder.trunc(builder.mul(group, INT(16)), WORD), WORDS)
        highs = [builder.lshr(self._line(high, _VECTOR * quarter), shift) for quarter in quarters]
        return lambda pair: [
            self._number(builder.or_(self._low(low, pair), self._high(high, pair)))
            for low, high in zip(lows, highs, strict=True)
        ]

    def _low(self, word, pair: int):
        return self._builder.and_(self._right(word, 4 * pair), _all(15))

    def _high(self, word, pair: int):
        left = 4 - 2 * pair
        moved = self._builder.shl(word, _all(left)) if left > 0 else self._right(word, -left)
        return self._builder.and_(moved, _all(0x30))

    def _table(self):
        """Return the numbers that 4 bits stand for, or nothing if numbers are computed."""
        if self.kind.has_codebook:
            return load_at(self._builder, self._codebook, 0, FLOATS)
        numbers = [float(number - self.kind.zero) for number in range(LANES)]
        return ir.Constant(FLOATS, numbers) if HAS_TABLES else None

    def _number(self, bits, table=None):
        """Return the numbers in the lowest bits of words, less zero: of 4 bits with anything above, or of 6 bits."""
        builder, kind = self._builder, self.kind
        if table is not None:
            function = ir.FunctionType(FLOATS, (FLOATS, WORDS))
            look_up = cgutils.get_or_insert_function(builder.module, function, "llvm.x86.avx512.permvar.sf.512")
            return builder.call(look_up, (table, bits))
        number = builder.and_(bits, _all(15)) if kind.bits == 4 else bits
        return builder.sitofp(builder.sub(number, _all(kind.zero)) if kind.zero else number, FLOATS)

    def _right(self, vector, shift: int):
        return self._builder.lshr(vector, _all(shift)) if shift else vector

    def _widened(self, address, offset: int):
        """Return signed bytes; the first ones of a line ask for another line."""
        if offset % _VECTOR == 0:
            self._prefetch(address, offset)
        return self._builder.sitofp(self._builder.sext(load_at(self._builder, address, offset, _BYTES), WORDS), FLOATS)

    def _line(self, address, offset: int):
        self._prefetch(address, offset)
        return load_at(self._builder, address, offset, WORDS)

    def _prefetch(self, address, offset: int) -> None:
        prefetch_line(self._builder, self._builder.add(address, INT(_AHEAD_BYTES + offset)))

    def _scaled(self, address, factors, quarter: int):
        """Return the scales of a quarter at an address: times their factors if there are any."""
        if self.kind.has_codebook:
            return load_at(self._builder, address, 4 * _OF_QUARTER * quarter, ir.VectorType(FLOAT, _OF_QUARTER))
        if not self.kind.has_factors:
            return self._halves(address, quarter)
        return self._multiplied(address, factors, quarter)

    def _multiplied(self, address, factors, quarter: int):
        """Return the bytes of a quarter at an address, times the float16 at `factors`."""
        builder, kind = self._builder, self.kind
        small = load_at(builder, address, _OF_QUARTER * quarter, ir.VectorType(ir.IntType(8), _OF_QUARTER))
        widen = builder.zext if kind.has_minimum else builder.sext
        scales = builder.sitofp(widen(small, ir.VectorType(WORD, _OF_QUARTER)), ir.VectorType(FLOAT, _OF_QUARTER))
        return builder.fmul(scales, self._halves(factors, quarter))

    def _halves(self, address, quarter: int):
        halves = load_at(self._builder, address, 2 * _OF_QUARTER * quarter, ir.VectorType(ir.HalfType(), _OF_QUARTER))
        return self._builder.fpext(halves, ir.VectorType(FLOAT, _OF_QUARTER))

    def _joined(self, quarters):
        one, other = quarters
        return shuffled(self._builder, one, other, range(LANES))

    def _twice(self, vector):
        return shuffled(self._builder, vector, vector, [lane // 2 for lane in range(LANES)])


def load_at(builder, address, offset: int, kind):
    """Return the vector at an address and some bytes."""
    place = builder.inttoptr(builder.add(address, INT(offset)), kind.as_pointer())
    return builder.load(place, align=1)


def store_at(builder, vector, address, offset: int) -> None:
    place = builder.inttoptr(builder.add(address, INT(offset)), vector.type.as_pointer())
    builder.store(vector, place, align=4)


def shuffled(builder, one, other, order: Sequence[int]):
    """Return the lanes of two vectors, one behind the other, in an order."""
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(WORD, len(order)), list(order)))


def multiply_add(builder, one, other, total):
    """Return `one * other + total`, rounded once where the processor can."""
    product = builder.fmul(one, other, flags=("contract",))
    return builder.fadd(product, total, flags=("contract",))


def _all(number: int):
    return ir.Constant(WORDS, [number] * LANES)


assert INPUTS == 2 * GROUP
