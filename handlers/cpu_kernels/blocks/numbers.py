"""Reads the numbers of blocks of few bits (see layout.py) into vectors: as float32, or as integers."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from handlers.cpu_kernels.blocks.layout import GROUP, OUTPUTS, Kind
from handlers.cpu_kernels.blocks.vectors import (
    BYTE,
    FLOATS,
    HALF,
    INT,
    QUARTERS,
    WORD,
    WORDS,
    in_all_lanes,
    load_at,
    shuffled,
)
from handlers.cpu_kernels.intrinsics import LANES, host_has, host_name, prefetch_line, spread

HAS_TABLES = host_has("avx512f")
"""Whether one instruction looks 16 numbers up in a table of float32. Without it no codebook is read."""
HAS_BIT_FIELDS = host_has("avx512vbmi")
"""Whether one instruction takes eight bits from any place of a word of 64 bits for each of its bytes."""
_VECTOR = 4 * LANES  # bytes
AHEAD_BYTES = 8192
"""At what distance memory is asked for, a line with each that is read.

As in amx.py: without it, products of one row take half as long again on an Intel Xeon.
"""
AHEAD_OF_ONE_ROW = 0 if host_name().startswith("znver") else AHEAD_BYTES
"""With it, one row takes 1.2 times as long on an AMD EPYC with weights of 8 bits; four rows need it there, too."""


class Numbers:
    """The numbers of a block at an address; its codebook, if it has one, is at another.

    With what is read, memory at a distance behind it is asked for, unless that is 0.
    """

    def __init__(self, builder, kind: Kind, address, codebook, distance: int) -> None:
        self._builder, self._kind, self._address, self._codebook = builder, kind, address, codebook
        self._distance = distance

    def bytes_of(self, group, pair: int, half: int) -> ir.Value:
        """Return the inputs of a pair in half the outputs, of 8 bits, as words of 16 bits."""
        found = self._bytes(group, pair, half, ir.VectorType(BYTE, 2 * LANES))
        return self._builder.sext(found, ir.VectorType(HALF, 2 * LANES))

    def two_pairs_of(self, group, pair: int, half: int) -> ir.Value:
        """Return the inputs of a pair and of the next one in half the outputs, of 8 bits, as words of four bytes."""
        one, other = (self._bytes(group, each, half, ir.VectorType(HALF, LANES)) for each in (pair, pair + 1))
        order = [place for lane in range(LANES) for place in (lane, LANES + lane)]
        return self._builder.bitcast(shuffled(self._builder, one, other, order), WORDS)

    def _bytes(self, group, pair: int, half: int, kind) -> ir.Value:
        offset = _VECTOR * pair + 2 * LANES * half
        address = self._of_group(group, 8)
        if half == 0:
            self._prefetch(address, offset)
        return load_at(self._builder, address, offset, kind)

    def quad(self, group, quad: int, half: int) -> ir.Value:
        """Return the numbers of a quad of inputs in half the outputs, of 8 bits, as bytes."""
        return self._line(self._of_group(group, 8), _VECTOR * (2 * quad + half))

    def nibbles_of(self, group, quarter: int) -> tuple[ir.Value, ir.Value]:
        """Return the numbers of a quarter, of 4 or 6 bits, as bytes: of pairs 0, 2, 4 and 6, and of the others."""
        builder, lower = self._builder, in_all_lanes(0x0F0F0F0F)
        found = self._line(self._of_group(group, 4), _VECTOR * quarter)
        lows = builder.and_(found, lower), builder.and_(self._right(found, 4), lower)
        if self._kind.bits == 4:
            return lows
        even, odd = self._highs_by_byte(group, quarter)
        return builder.or_(lows[0], even), builder.or_(lows[1], odd)

    def words(self, group):
        """Return a function: a pair of a group -> its numbers in both halves, less zero, as words of 16 bits."""
        builder, halves, in_words = self._builder, range(2), ir.VectorType(HALF, 2 * LANES)
        if self._kind.bits == 8:
            return lambda pair: [self.bytes_of(group, pair, half) for half in halves]
        quarters = [
            [builder.bitcast(each, in_words) for each in self.nibbles_of(group, quarter)] for quarter in range(QUARTERS)
        ]
        orders = [range(place, 4 * LANES, 2) for place in range(2)]
        # For each half, and for the even and the odd pairs: words with the bytes of the first two, and of the others.
        joined = [list(zip(*quarters[first : first + 2], strict=True)) for first in (0, 2)]
        twos = [[[shuffled(builder, one, other, order) for order in orders] for one, other in half] for half in joined]
        return lambda pair: [self._byte(twos[half][pair % 2][pair // 4], pair // 2 % 2) for half in halves]

    def _byte(self, words, place: int):
        """Return the lower or the upper bytes of words of 16 bits, less zero."""
        builder, zero = self._builder, self._kind.zero
        eights, low, zeros = (ir.Constant(words.type, [number] * words.type.count) for number in (8, 255, zero))
        found = builder.lshr(words, eights) if place else builder.and_(words, low)
        return builder.sub(found, zeros) if zero else found

    def pairs(self, group):
        """Return a function: a pair of a group, which is a number that is known at run time -> numbers of quarters."""
        kind, quarters = self._kind, range(QUARTERS)
        address = self._of_group(group, kind.low_bits)
        if kind.has_quads:
            return lambda pair: [self._of_quads(address, pair, quarter) for quarter in quarters]
        if kind.low_bits == 8:
            return lambda pair: [self._widened(address, _VECTOR * pair + LANES * quarter) for quarter in quarters]
        if kind.bits == 4:
            lows = [self._line(address, _VECTOR * quarter) for quarter in quarters]
            table = self._table()
            return lambda pair: [self._number(self._right(word, 4 * pair), table) for word in lows]
        of_bytes = [self._signed_bytes(group, quarter) for quarter in quarters]
        return lambda pair: [self._byte_as_float(even_and_odd[pair % 2], pair // 2) for even_and_odd in of_bytes]

    def _of_group(self, group, bits: int):
        """Return the address of a group whose numbers have so many bits beside each other."""
        return self._builder.add(self._address, self._builder.mul(group, INT(GROUP * OUTPUTS * bits // 8)))

    def _highs_by_byte(self, group, quarter: int):
        """Return the upper bits of `nibbles_of`, of 6 bits, where they are in its bytes, and zeros around them.

        They are bits 2 * p and 2 * p + 1 of a word for pair p, 16 bits above in the second group.
        """
        builder = self._builder
        behind = builder.add(self._address, INT(GROUP * OUTPUTS))  # the lowest 4 bits of both groups
        words, shift = self._line(behind, _VECTOR * quarter), builder.mul(group, INT(16))
        if HAS_BIT_FIELDS:
            fields = [_bit_fields(builder, words, first, shift) for first in (0, 2)]
            return [builder.and_(found, in_all_lanes(0x30303030)) for found in fields]
        highs = builder.lshr(words, spread(builder, builder.trunc(shift, WORD), WORDS))
        return [_by_byte(builder, each) for each in (highs, self._right(highs, 2))]

    def _signed_bytes(self, group, quarter: int):
        """Return what `nibbles_of` does, less zero: as bytes with a sign."""
        builder, of_bytes = self._builder, ir.VectorType(BYTE, _VECTOR)
        zeros = ir.Constant(of_bytes, [self._kind.zero] * _VECTOR)
        found = [builder.bitcast(each, of_bytes) for each in self.nibbles_of(group, quarter)]
        return [builder.bitcast(builder.sub(each, zeros), WORDS) for each in found]

    def _byte_as_float(self, words, place: int):
        """Return the bytes at a place of words, which have a sign."""
        left = in_all_lanes(24 - 8 * place)
        moved = self._builder.shl(words, left) if place < 3 else words
        return self._builder.sitofp(self._builder.ashr(moved, in_all_lanes(24)), FLOATS)

    def _table(self):
        """Return the numbers that 4 bits stand for, or nothing if numbers are computed."""
        if self._kind.has_codebook:
            return load_at(self._builder, self._codebook, 0, FLOATS)
        numbers = [float(number - self._kind.zero) for number in range(LANES)]
        return ir.Constant(FLOATS, numbers) if HAS_TABLES else None

    def _number(self, bits, table=None):
        """Return the numbers in the lowest 4 bits of words, less zero."""
        builder, kind = self._builder, self._kind
        if table is not None:
            function = ir.FunctionType(FLOATS, (FLOATS, WORDS))
            look_up = cgutils.get_or_insert_function(builder.module, function, "llvm.x86.avx512.permvar.sf.512")
            return builder.call(look_up, (table, bits))
        number = builder.and_(bits, in_all_lanes(15))
        return builder.sitofp(builder.sub(number, in_all_lanes(kind.zero)) if kind.zero else number, FLOATS)

    def _right(self, vector, shift: int):
        return self._builder.lshr(vector, in_all_lanes(shift)) if shift else vector

    def _widened(self, address, offset: int):
        """Return signed bytes; the first ones of a line ask for another line."""
        if offset % _VECTOR == 0:
            self._prefetch(address, offset)
        found = load_at(self._builder, address, offset, ir.VectorType(BYTE, LANES))
        return self._builder.sitofp(self._builder.sext(found, WORDS), FLOATS)

    def _of_quads(self, address, pair: int, quarter: int):
        """Return the inputs of a pair, which are in two quads."""
        builder, bytes_of = self._builder, ir.VectorType(BYTE, 2 * LANES)
        quads = [2 * (pair % 2) + place for place in range(2)]
        one, other = (load_at(builder, address, _VECTOR * (2 * quad) + 2 * LANES * quarter, bytes_of) for quad in quads)
        lanes = [4 * output + pair // 2 + place * 2 * LANES for output in range(LANES // 2) for place in range(2)]
        found = builder.shuffle_vector(one, other, ir.Constant(WORDS, lanes))
        less = in_all_lanes(self._kind.zero)
        return builder.sitofp(builder.sub(builder.zext(found, WORDS), less), FLOATS)

    def _line(self, address, offset: int):
        self._prefetch(address, offset)
        return load_at(self._builder, address, offset, WORDS)

    def _prefetch(self, address, offset: int) -> None:
        if self._distance:
            prefetch_line(self._builder, self._builder.add(address, INT(self._distance + offset)))


def _bit_fields(builder, words, first: int, shift):
    """Return in byte n of each word the bits from 4 * n + `first` - 4 on, and some further to the left."""
    of_bytes, count = ir.VectorType(BYTE, _VECTOR), _VECTOR // 8
    places = [(32 * word + 4 * place + first - 4) % 64 for word in range(2) for place in range(4)]
    begins = builder.add(ir.Constant(of_bytes, places * count), spread(builder, builder.trunc(shift, BYTE), of_bytes))
    function = ir.FunctionType(of_bytes, (of_bytes, of_bytes))
    select = cgutils.get_or_insert_function(builder.module, function, "llvm.x86.avx512.pmultishift.qb.512")
    return builder.bitcast(builder.call(select, (begins, builder.bitcast(words, of_bytes))), WORDS)


def _by_byte(builder, highs):
    """Bring the upper bits of pairs 0, 2, 4 and 6 to bits 4 and 5 of the four bytes of their word."""
    spaced = _spaced(builder, highs, 0x0033, 0x3300, 8)
    return builder.shl(_spaced(builder, spaced, 0x00030003, 0x00300030, 4), in_all_lanes(4))


def _spaced(builder, words, kept: int, moved: int, left: int):
    """Return some bits of words where they are, and others further to the left."""
    far = builder.shl(builder.and_(words, in_all_lanes(moved)), in_all_lanes(left))
    return builder.or_(builder.and_(words, in_all_lanes(kept)), far)
