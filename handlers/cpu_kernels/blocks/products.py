"""The product of few rows of activations and blocks of few bits, in vector registers.

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
from handlers.cpu_kernels.intrinsics import LANES, TILE_ROWS, host_has, spread

TOTALS = 2 * OUTPUTS
"""How many sums a row has: for each output one of the first inputs of all pairs, and one of the second ones."""

_PAIR = ir.DoubleType()  # of float32: what one instruction spreads
_HAS_32_REGISTERS = host_has("avx512f")


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
        for_kind(builder, code, lambda kind: _multiply(builder, kind, panel, blocks, [row], totals))
        return ctx.get_dummy_value()

    return types.void(types.int64, types.uintp, types.intp, types.uintp, types.uintp), build


@intrinsic
def multiply_rows(context, code, panel, blocks, rows, totals):
    """Do what `multiply_row` does for TILE_ROWS rows, one behind the other: a row gets the same bits."""

    def build(ctx, builder, sig, args):
        code, panel, blocks, rows, totals = args
        size = builder.mul(blocks, INT(4 * INPUTS))
        of_rows = [builder.add(rows, builder.mul(size, INT(row))) for row in range(TILE_ROWS)]
        for_kind(builder, code, lambda kind: _multiply(builder, kind, panel, blocks, of_rows, totals))
        return ctx.get_dummy_value()

    return types.void(types.int64, types.uintp, types.intp, types.uintp, types.uintp), build


def _multiply(builder, kind, panel, blocks, rows, totals) -> None:
    for line in range(0, 4 * TOTALS * len(rows), 4 * LANES):
        store_at(builder, ir.Constant(FLOATS, None), totals, line)

    # The sums of four rows and all outputs take 16 registers.
    is_whole = len(rows) == 1 or _HAS_32_REGISTERS
    with cgutils.for_range(builder, blocks) as loop:
        inputs = [builder.add(row, builder.mul(loop.index, INT(4 * INPUTS))) for row in rows]
        block = block_at(builder, kind, panel, loop.index)
        for quarters in [range(QUARTERS)] if is_whole else [[quarter] for quarter in range(QUARTERS)]:
            _Sums(builder, block, quarters, totals).add(inputs)


class _Sums:
    """Adds the products of rows and some quarters of a block to the totals at an address."""

    def __init__(self, builder, block: Block, quarters, totals) -> None:
        self._builder, self._block, self._quarters, self._totals = builder, block, list(quarters), totals

    def add(self, inputs) -> None:
        """Add those of rows of which the inputs of the block are at addresses."""
        builder, kind = self._builder, self._block.kind
        sums = [[cgutils.alloca_once(builder, FLOATS) for _ in self._quarters] for _ in inputs]
        of_inputs = [cgutils.alloca_once(builder, FLOATS) for _ in inputs if kind.has_minimum]
        self._clear([total for row in sums for total in row] + of_inputs)
        with cgutils.for_range(builder, INT(2)) as loop:
            begins = [builder.add(begin, builder.mul(loop.index, INT(8 * PAIRS))) for begin in inputs]
            numbers_of = self._block.pairs(loop.index, self._quarters)
            for pair in range(PAIRS):
                self._add_pair(numbers_of(pair), begins, 8 * pair, sums, of_inputs)
            if kind.scales > 1:
                self._scale(sums, [self._block.scales(quarter, loop.index) for quarter in self._quarters])
                self._clear([total for row in sums for total in row])
        if kind.scales == 1:
            self._scale(sums, [self._block.scales(quarter, INT(0)) for quarter in self._quarters])
        if kind.has_minimum:
            repeated = [[total] * len(self._quarters) for total in of_inputs]
            self._scale(repeated, [self._block.minima(quarter) for quarter in self._quarters])

    def _add_pair(self, numbers, begins, offset: int, sums, of_inputs) -> None:
        builder = self._builder
        for row, begin in enumerate(begins):
            pair = spread(builder, load_at(builder, begin, offset, _PAIR), ir.VectorType(_PAIR, LANES // 2))
            factor = builder.bitcast(pair, FLOATS)
            for total, number in zip(sums[row], numbers, strict=True):
                builder.store(multiply_add(builder, number, factor, builder.load(total)), total)
            if of_inputs:
                builder.store(builder.fadd(builder.load(of_inputs[row]), factor), of_inputs[row])

    def _clear(self, sums) -> None:
        for total in sums:
            self._builder.store(ir.Constant(FLOATS, None), total)

    def _scale(self, sums, scales) -> None:
        """Add sums of rows, scaled, to the totals."""
        for row, of_row in enumerate(sums):
            for quarter, total, scale in zip(self._quarters, of_row, scales, strict=True):
                place = 4 * (TOTALS * row + LANES * quarter)
                before = load_at(self._builder, self._totals, place, FLOATS)
                added = multiply_add(self._builder, self._builder.load(total), scale, before)
                store_at(self._builder, added, self._totals, place)
