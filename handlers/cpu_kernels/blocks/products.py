"""The product of a row of activations and blocks of few bits, in vector registers.

Nothing that is unpacked goes through memory, so that one row takes about as long as reading its weights. Numbers are
multiplied, and then the sums of a block are scaled: no weight is rounded.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from handlers.cpu_kernels.blocks import integers
from handlers.cpu_kernels.blocks.layout import INPUTS, KINDS
from handlers.cpu_kernels.blocks.numbers import AHEAD_BYTES, AHEAD_OF_ONE_ROW
from handlers.cpu_kernels.blocks.reading import Block, block_at, for_kind
from handlers.cpu_kernels.blocks.vectors import (
    FLOATS,
    INT,
    PAIRS,
    QUARTERS,
    load_at,
    multiply_add,
    shuffled,
    store_at,
)
from handlers.cpu_kernels.intrinsics import LANES, spread

_PAIR = ir.DoubleType()  # of float32: what one instruction spreads


@intrinsic
def address_of(context, array):
    """Return the address of an array's first element."""

    def build(ctx, builder, sig, args):
        return builder.ptrtoint(ctx.make_array(sig.args[0])(ctx, builder, args[0]).data, INT)

    return types.uintp(array), build


@intrinsic
def multiply_row(context, code, panel, blocks, row, sums, like):
    """Write the products of a row and the panel of a kind to `sums`, OUTPUTS float32.

    panel, row, sums: addresses, the row's of `blocks` x INPUTS float32; or of what `prepare` writes for each block, if
    `like` is bfloat16 and integers are multiplied.
    """
    is_prepared = integers.IS_USABLE and like == types.uint16

    def build(ctx, builder, sig, args):
        code, panel, blocks, row, sums, _ = args

        def of_kind(kind):
            in_integers = is_prepared and integers.multiplies(kind)
            totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(2 if in_integers else QUARTERS)]
            for total in totals:
                builder.store(ir.Constant(FLOATS, None), total)
            size, begin = (integers.PREPARED_BYTES, integers.FLOATS_AT) if is_prepared else (4 * INPUTS, 0)
            with cgutils.for_range(builder, blocks) as loop:
                inputs = builder.add(row, builder.mul(loop.index, INT(size)))
                distance = AHEAD_OF_ONE_ROW if in_integers else AHEAD_BYTES
                block = block_at(builder, kind, panel, loop.index, distance)
                if in_integers:
                    integers.IntegerSums(builder, block, totals).add(inputs)
                else:
                    _Sums(builder, block, totals).add(builder.add(inputs, INT(begin)))
            found = [builder.load(total) for total in totals]
            for place, of_outputs in enumerate(found if in_integers else _by_output(builder, found)):
                store_at(builder, of_outputs, sums, 4 * LANES * place)

        for_kind(builder, code, of_kind, [kind for kind in KINDS if not kind.has_quads])
        return ctx.get_dummy_value()

    given = types.int64, types.uintp, types.intp, types.uintp, types.uintp
    return types.void(*given, like), build


def _by_output(builder, totals):
    """Return the sums of outputs, given those of the first and the second inputs of all pairs, beside each other."""
    for one, other in (totals[:2], totals[2:]):
        first, second = (shuffled(builder, one, other, range(place, 2 * LANES, 2)) for place in range(2))
        yield builder.fadd(first, second)


class _Sums:
    """Adds the products of a row and a block to totals, a vector for each quarter of the outputs."""

    def __init__(self, builder, block: Block, totals) -> None:
        self._builder, self._block, self._totals = builder, block, totals

    def add(self, inputs) -> None:
        """Add those of the inputs of the block, which are at an address."""
        builder, kind = self._builder, self._block.kind
        sums = [cgutils.alloca_once(builder, FLOATS) for _ in range(QUARTERS)]
        of_inputs = [cgutils.alloca_once(builder, FLOATS)] if kind.has_minimum else []
        self._clear(sums + of_inputs)
        with cgutils.for_range(builder, INT(2)) as loop:
            begin = builder.add(inputs, builder.mul(loop.index, INT(8 * PAIRS)))
            numbers_of = self._block.numbers.pairs(loop.index)
            for pair in range(PAIRS):
                self._add_pair(numbers_of(pair), begin, 8 * pair, sums, of_inputs)
            if kind.scales > 1:
                self._scale(sums, lambda quarter: self._block.scales.of_quarter(quarter, loop.index))
                self._clear(sums)
        if kind.scales == 1:
            self._scale(sums, lambda quarter: self._block.scales.of_quarter(quarter, INT(0)))
        self._scale(QUARTERS * of_inputs, self._block.scales.minima_of_quarter)

    def _add_pair(self, numbers, begin, offset: int, sums, of_inputs) -> None:
        builder = self._builder
        pair = spread(builder, load_at(builder, begin, offset, _PAIR), ir.VectorType(_PAIR, LANES // 2))
        factor = builder.bitcast(pair, FLOATS)
        for total, number in zip(sums, numbers, strict=True):
            builder.store(multiply_add(builder, number, factor, builder.load(total)), total)
        for total in of_inputs:
            builder.store(builder.fadd(builder.load(total), factor), total)

    def _clear(self, sums) -> None:
        for total in sums:
            self._builder.store(ir.Constant(FLOATS, None), total)

    def _scale(self, sums, scale_of) -> None:
        """Add sums of the quarters, scaled, to the totals; or do nothing without sums."""
        for quarter, total in enumerate(sums):
            before = self._builder.load(self._totals[quarter])
            added = multiply_add(self._builder, self._builder.load(total), scale_of(quarter), before)
            self._builder.store(added, self._totals[quarter])
