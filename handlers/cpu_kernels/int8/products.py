"""The products of rows of activations in 8 bits and blocks of few bits.

Numbers of the weights are bytes without a sign. The products of both are added in integers of 32 bits, exactly, and
then scaled: a row gets the same bits whatever the others are. AVX-512 VNNI and i8mm of Arm multiply four pairs of bytes
in each lane and add them with one instruction; other processors multiply words, and find the same integers.

One row is multiplied by what registers unpack. For several rows, a section of blocks is laid first: its numbers are
unpacked to bytes and its scales to float32. These stay in the L1 cache while all rows are multiplied by them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from handlers.cpu_kernels import byte_products
from handlers.cpu_kernels.blocks.layout import GROUP, INPUTS, KINDS, OUTPUTS, QUADS, Kind
from handlers.cpu_kernels.blocks.reading import Block, block_at, for_kind
from handlers.cpu_kernels.blocks.vectors import (
    FLOAT,
    FLOATS,
    HALF,
    INT,
    WORD,
    WORDS,
    load_at,
    multiply_add,
    shuffled,
    store_at,
)
from handlers.cpu_kernels.byte_products import add_byte_products
from handlers.cpu_kernels.int8.quantising import QUANTISED_BYTES, SCALE_AT, SCALED_SUM_AT, begin_at
from handlers.cpu_kernels.intrinsics import LANES, prefetch_line, spread

_HAS_INSTRUCTION = byte_products.HAS_VNNI or byte_products.HAS_I8MM
ROWS = 4 if _HAS_INSTRUCTION else 1  # words of several rows would not stay in registers
"""How many rows `multiply_laid` multiplies at once."""
_HALVES, _GROUPS = range(2), range(INPUTS // GROUP)  # of the outputs, of the inputs
_LINE = 4 * LANES
_SCALES_AT = INPUTS * OUTPUTS
_MINIMA_AT = _SCALES_AT + 4 * OUTPUTS  # or the scales of the second group
LAID_BYTES = _MINIMA_AT + 4 * OUTPUTS
"""Of a block as `lay` writes it."""


def multiplies(kind: Kind) -> bool:
    """Whether activations in 8 bits multiply blocks of a kind."""
    return not kind.has_codebook and (kind.bits < 8 or kind.has_quads)


_KINDS = [kind for kind in KINDS if multiplies(kind)]


class Stored(NamedTuple):
    """The weights of a block, which registers unpack."""

    builder: Any
    block: Block

    @property
    def kind(self) -> Kind:
        return self.block.kind

    def quads(self, group: int) -> Iterator[Sequence[Any]]:
        """Yield the numbers of each quad of a group, those of both halves of the outputs."""
        numbers = self.block.numbers
        if self.kind.has_quads:
            for quad in range(QUADS):
                yield [numbers.quad(QUADS * group + quad, half) for half in _HALVES]
            return
        quarters = [numbers.nibbles_of(INT(group), quarter) for quarter in range(4)]
        for first in range(2):
            for place in range(2):
                lanes = range(place, 2 * LANES, 2)
                of_quarters = [pairs[first] for pairs in quarters]
                halves = zip(of_quarters[::2], of_quarters[1::2], strict=True)
                yield [shuffled(self.builder, one, other, lanes) for one, other in halves]

    def scale(self, half: int, group: int) -> Any:
        """Return the scales of half the outputs, of a group if its groups have their own."""
        return self.block.scales.of_half(half, group)

    def minimum(self, half: int) -> Any:
        """Return the minima of half the outputs with the sign changed."""
        return self.builder.fneg(self.block.scales.minima_of_half(half))


class Laid(NamedTuple):
    """The weights of a block that `lay` has written to an address."""

    builder: Any
    kind: Kind
    address: Any

    def quads(self, group: int) -> Iterator[Sequence[Any]]:
        for quad in range(QUADS):
            offset = 2 * _LINE * (QUADS * group + quad)
            yield [load_at(self.builder, self.address, offset + _LINE * half, WORDS) for half in _HALVES]

    def scale(self, half: int, group: int) -> Any:
        return load_at(self.builder, self.address, _SCALES_AT + 4 * OUTPUTS * group + _LINE * half, FLOATS)

    def minimum(self, half: int) -> Any:
        return load_at(self.builder, self.address, _MINIMA_AT + _LINE * half, FLOATS)


def _groups_of(kind: Kind) -> Iterable[Sequence[int]]:
    """Return the groups of a block that share a scale."""
    return [_GROUPS] if kind.scales == 1 else [[group] for group in _GROUPS]


@intrinsic
def lay(context, code, panel, first, blocks, target):
    """Write blocks `first` to `first + blocks` - 1 of the panel of a kind to a target as `multiply_laid` reads them."""

    def build(ctx, builder, sig, args):
        code, panel, first, blocks, target = args

        def of_kind(kind):
            with cgutils.for_range(builder, blocks) as loop:
                stored = Stored(builder, block_at(builder, kind, panel, builder.add(first, loop.index)))
                out = builder.add(target, builder.mul(loop.index, INT(LAID_BYTES)))
                for group in _GROUPS:
                    for quad, numbers in enumerate(stored.quads(group), QUADS * group):
                        for half in _HALVES:
                            store_at(builder, numbers[half], out, _LINE * (2 * quad + half))
                for half in _HALVES:
                    for groups in _groups_of(kind):
                        place = _SCALES_AT + 4 * OUTPUTS * groups[0] + _LINE * half
                        store_at(builder, stored.scale(half, groups[0]), out, place)
                    if kind.has_minimum:
                        store_at(builder, stored.minimum(half), out, _MINIMA_AT + _LINE * half)

        for_kind(builder, code, of_kind, _KINDS)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.uintp, types.intp, types.intp, types.uintp), build


@intrinsic
def begin_of(context, code, panel, number):
    """Return the address of a block of the panel of a kind, by its number."""

    def build(ctx, builder, sig, args):
        code, panel, number = args
        found = panel
        for kind in _KINDS:
            before, inside = (getattr(builder, name)(number, INT(kind.blocks)) for name in ("udiv", "urem"))
            offset = builder.add(builder.mul(before, INT(kind.super_bytes)), builder.mul(inside, INT(kind.block_bytes)))
            found = builder.select(builder.icmp_signed("==", code, INT(kind.code)), builder.add(panel, offset), found)
        return found

    return types.uintp(types.int64, types.uintp, types.intp), build


@intrinsic
def multiply_laid(context, code, laid, blocks, rows, stride, count, sums, ahead, lines):
    """Add the products of up to ROWS rows and blocks that `lay` has written to `sums`, OUTPUTS float32 for each row.

    rows: the address of what `quantise` wrote of the first of these blocks, `stride` bytes before that of the next row.
    With each block so many lines are asked for, from the address `ahead` on: memory is read while this computes.
    """

    def build(ctx, builder, sig, args):
        code, laid, blocks, rows, stride, count, sums, ahead, lines = args
        last = builder.sub(count, INT(1))
        places = [_smaller(builder, INT(row), last) for row in range(ROWS)]  # the last row again in place of others
        begins = [builder.add(rows, builder.mul(stride, place)) for place in places]
        targets = [builder.add(sums, builder.mul(INT(8 * LANES), place)) for place in places]
        for kinds in _alike():

            def laid_at(index, kind=kinds[0]):
                with cgutils.for_range(builder, lines) as loop:
                    line = builder.add(builder.mul(index, lines), loop.index)
                    prefetch_line(builder, builder.add(ahead, builder.mul(line, INT(_LINE))))
                return Laid(builder, kind, builder.add(laid, builder.mul(index, INT(LAID_BYTES))))

            is_one = [builder.icmp_signed("==", code, INT(kind.code)) for kind in kinds]
            with builder.if_then(_any(builder, is_one)):
                of_groups = [_begin_of(builder, code, kinds, groups[0]) for groups in _groups_of(kinds[0])]
                _multiply(builder, laid_at, blocks, of_groups, begins, targets)
        return ctx.get_dummy_value()

    given = types.int64, types.uintp, types.intp, types.uintp, types.intp, types.intp, types.uintp
    return types.void(*given, types.uintp, types.intp), build


def _alike() -> Iterable[list[Kind]]:
    """Return kinds by what laid blocks of them have: minima, and scales of groups."""
    found: dict[tuple[bool, int], list[Kind]] = {}
    for kind in _KINDS:
        found.setdefault((kind.has_minimum, kind.scales), []).append(kind)
    return found.values()


def _any(builder, conditions):
    first, *others = conditions
    for other in others:
        first = builder.or_(first, other)
    return first


def _begin_of(builder, code, kinds: Sequence[Kind], group: int):
    """Return where the word is that sums begin with, for the kind that `code` is of."""
    place = INT(begin_at(kinds[0], group))
    for kind in kinds[1:]:
        is_kind = builder.icmp_signed("==", code, INT(kind.code))
        place = builder.select(is_kind, INT(begin_at(kind, group)), place)
    return place


def _smaller(builder, one, other):
    return builder.select(builder.icmp_signed("<", one, other), one, other)


@intrinsic
def multiply_stored(context, code, panel, blocks, row, sums):
    """Add the products of a row and the panel of a kind to `sums`, OUTPUTS float32.

    panel, row, sums: addresses, the row's of what `quantise` wrote of its first block.
    """

    def build(ctx, builder, sig, args):
        code, panel, blocks, row, sums = args

        def of_kind(kind):
            def stored_at(index):
                return Stored(builder, block_at(builder, kind, panel, index))

            begins = [INT(begin_at(kind, groups[0])) for groups in _groups_of(kind)]
            _multiply(builder, stored_at, blocks, begins, [row], [sums])

        for_kind(builder, code, of_kind, _KINDS)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.uintp, types.intp, types.uintp, types.uintp), build


def _multiply(builder, weights_at, blocks, begins, rows, sums) -> None:
    """Multiply rows at addresses and add to the sums at others. `begins`: see `begin_at`, for each scale of a block."""
    totals = [[cgutils.alloca_once(builder, FLOATS) for _ in _HALVES] for _ in rows]
    for of_row, source in zip(totals, sums, strict=True):
        for half, total in enumerate(of_row):
            builder.store(load_at(builder, source, _LINE * half, FLOATS), total)
    with cgutils.for_range(builder, blocks) as loop:
        weights = weights_at(loop.index)
        offset = builder.mul(loop.index, INT(QUANTISED_BYTES))
        inputs = [builder.add(row, offset) for row in rows]
        for groups, begin in zip(_groups_of(weights.kind), begins, strict=True):
            _add(builder, weights, groups, begin, inputs, totals)
    for of_row, target in zip(totals, sums, strict=True):
        for half, total in enumerate(of_row):
            store_at(builder, builder.load(total), target, _LINE * half)


def _add(builder, weights, groups: Sequence[int], begin, inputs, totals) -> None:
    """Add the products of those groups of a block that have one scale to totals of each row."""

    def spread_at(address, offset: int, kind, vector):
        return spread(builder, load_at(builder, address, offset, kind), vector)

    sums = [[spread_at(builder.add(row, begin), 0, WORD, WORDS)] * 2 for row in inputs]
    for group in groups:
        for quad, numbers in enumerate(weights.quads(group), QUADS * group):
            for row, of_row in zip(inputs, sums, strict=True):
                factors = spread_at(row, 4 * quad, WORD, WORDS)
                for half in _HALVES:
                    of_row[half] = _added(builder, of_row[half], numbers[half], factors)
    scales = [weights.scale(half, groups[0]) for half in _HALVES]
    minima = [weights.minimum(half) for half in _HALVES] if weights.kind.has_minimum else None
    for row, of_row, of_totals in zip(inputs, sums, totals, strict=True):
        scale = spread_at(row, SCALE_AT, FLOAT, FLOATS)
        for half, total in enumerate(of_totals):
            scaled = builder.fmul(builder.sitofp(of_row[half], FLOATS), scales[half])
            found = multiply_add(builder, scaled, scale, builder.load(total))
            if minima is not None:
                less = spread_at(row, SCALED_SUM_AT, FLOAT, FLOATS)
                found = multiply_add(builder, minima[half], less, found)
            builder.store(found, total)


def _added(builder, total, numbers, factors):
    if _HAS_INSTRUCTION:
        return add_byte_products(builder, total, numbers, factors, "second")
    return _add_in_words(builder, total, numbers, factors)


def _add_in_words(builder, total, numbers, factors):
    """Add the products of bytes, which fit into 16 bits with a sign: two at a time, where an instruction does that."""
    halves = ir.VectorType(HALF, 2 * LANES)
    eights = ir.Constant(halves, [8] * (2 * LANES))
    of_numbers, of_factors = builder.bitcast(numbers, halves), builder.bitcast(factors, halves)
    lower = builder.and_(of_numbers, ir.Constant(halves, [255] * (2 * LANES)))
    signed = builder.ashr(builder.shl(of_factors, eights), eights)
    for one, other in ((lower, signed), (builder.lshr(of_numbers, eights), builder.ashr(of_factors, eights))):
        for place in range(2):  # LLVM knows the instruction that multiplies words and adds two neighbours
            lanes = ir.Constant(WORDS, list(range(place, 2 * LANES, 2)))
            words = [builder.sext(builder.shuffle_vector(each, each, lanes), WORDS) for each in (one, other)]
            total = builder.add(total, builder.mul(*words))
    return total


assert QUADS == GROUP // 4
assert 2 * LANES == OUTPUTS
assert not any(kind.has_minimum and kind.scales > 1 for kind in _KINDS)
