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

from handlers.cpu_kernels.blocks.layout import INPUTS, OUTPUTS
from handlers.cpu_kernels.blocks.reading import (
    FLOATS,
    INT,
    PAIRS,
    QUARTERS,
    Block,
    block_at,
    for_kind,
    load_at,
    multiply_add,
    store_at,
)
from handlers.cpu_kernels.intrinsics import LANES, spread

TOTALS = 2 * OUTPUTS
"""How many sums a row has: for each output one of the first inputs of all pairs, and one of the second ones."""

_PAIR = ir.DoubleType()  # of float32: what one instruction spreads


@intrinsic
def address_of(context, array):
    """Return the address of an array's first element."""

    def build(ctx, builder, sig, args):
        return builder.ptrtoint(ctx.make_array(sig.args[0])(ctx, builder, args[0]).data, INT)

    return types.uintp(array), build


@intrinsic
def multiply_row(context, code, panel, blocks, row, totals):
    """Write the products of a row and the panel of a kind to `totals`, TOTALS float32.

    panel, row, totals: addresses, the row's of `blocks` x INPUTS float32.
    """

    def build(ctx, builder, sig, args):
        code, panel, blocks, row, totals = args

        def of_kind(kind):
            for quarter in range(QUARTERS):
                store_at(builder, ir.Constant(FLOATS, None), totals, 4 * LANES * quarter)
            with cgutils.for_range(builder, blocks) as loop:
                inputs = builder.add(row, builder.mul(loop.index, INT(4 * INPUTS)))
                _Sums(builder, block_at(builder, kind, panel, loop.index), totals).add(inputs)

        for_kind(builder, code, of_kind)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.uintp, types.intp, types.uintp, types.uintp), build


class _Sums:
    """Adds the products of a row and a block to the totals at an address."""

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
            numbers_of = self._block.pairs(loop.index)
            for pair in range(PAIRS):
                self._add_pair(numbers_of(pair), begin, 8 * pair, sums, of_inputs)
            if kind.scales > 1:
                self._scale(sums, lambda quarter: self._block.scales(quarter, loop.index))
                self._clear(sums)
        if kind.scales == 1:
            self._scale(sums, lambda quarter: self._block.scales(quarter, INT(0)))
        self._scale(QUARTERS * of_inputs, self._block.minima)

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
            place = 4 * LANES * quarter
            before = load_at(self._builder, self._totals, place, FLOATS)
            added = multiply_add(self._builder, self._builder.load(total), scale_of(quarter), before)
            store_at(self._builder, added, self._totals, place)
