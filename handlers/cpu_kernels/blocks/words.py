"""The products of several rows of bfloat16 and blocks of few bits, in integers of 16 bits.

ROWS rows are multiplied at once, so that they share the unpacking of numbers. Their integers, and the order in which
these are scaled and added, are those of `multiply_row`: a row gets the same bits alone and beside others.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

import itertools

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from handlers.cpu_kernels import byte_products
from handlers.cpu_kernels.blocks.integers import SCALE_OF_WORDS_AT, SUM_OF_WORDS_AT, WORDS_BYTES, add_words, multiplies
from handlers.cpu_kernels.blocks.layout import KINDS
from handlers.cpu_kernels.blocks.reading import Block, block_at, for_kind
from handlers.cpu_kernels.blocks.vectors import (
    FLOAT,
    FLOATS,
    INT,
    PAIRS,
    WORD,
    WORDS,
    load_at,
    multiply_add,
    store_at,
)
from handlers.cpu_kernels.intrinsics import LANES, spread

IS_USABLE = byte_products.HAS_VNNI
"""Whether the processor multiplies pairs of words."""
KINDS_IN_WORDS = sum(1 << kind.code for kind in KINDS if multiplies(kind)) if IS_USABLE else 0
"""The kinds of blocks that several rows multiply so, as bits."""
ROWS = 4
"""How many rows `multiply_words` multiplies at once."""
_HALVES = range(2)  # of the outputs


@intrinsic
def multiply_words(context, code, panel, first, blocks, rows, sums):
    """Add the products of ROWS rows and blocks `first` to `first + blocks` - 1 of the panel of a kind to `sums`.

    panel: an address. rows: the address of what `prepare_words` wrote of all rows for the first of these blocks; what
    it wrote for the next ones follows. sums: the address of OUTPUTS float32 for each row.
    """

    def build(ctx, builder, sig, args):
        code, panel, first, blocks, rows, sums = args

        def of_kind(kind):
            with cgutils.for_range(builder, blocks) as loop:
                inputs = builder.add(rows, builder.mul(INT(ROWS * WORDS_BYTES), loop.index))
                block = block_at(builder, kind, panel, builder.add(first, loop.index))
                _Products(builder, block, inputs).add_to(sums)

        for_kind(builder, code, of_kind, [kind for kind in KINDS if multiplies(kind)])
        return ctx.get_dummy_value()

    return types.void(types.int64, types.uintp, types.intp, types.intp, types.uintp, types.uintp), build


class _Products:
    """The products of a block and ROWS rows, whose inputs are at an address."""

    def __init__(self, builder, block: Block, inputs) -> None:
        self._builder, self._block, self._inputs = builder, block, inputs

    def add_to(self, sums) -> None:
        """Add them to the sums of rows, at an address. Sums pass through memory once for each block."""
        builder, scales = self._builder, self._block.scales
        of_outputs = [scales.of_half(half) for half in _HALVES]
        minima = [scales.minima_of_half(half) for half in _HALVES] if self._block.kind.has_minimum else None
        for row, integers in enumerate(self._integers()):
            scaled = [
                builder.fmul(builder.sitofp(part, FLOATS), scale)
                for part, scale in zip(integers, of_outputs, strict=True)
            ]
            if minima is not None:
                total = self._spread(self._inputs, row, SUM_OF_WORDS_AT, FLOAT, FLOATS)
                scaled = [
                    builder.fsub(one, builder.fmul(less, total)) for one, less in zip(scaled, minima, strict=True)
                ]
            scale = self._spread(self._inputs, row, SCALE_OF_WORDS_AT, FLOAT, FLOATS)
            for half, products in enumerate(scaled):
                offset = 4 * LANES * (2 * row + half)
                before = load_at(builder, sums, offset, FLOATS)
                store_at(builder, multiply_add(builder, products, scale, before), sums, offset)

    def _integers(self):
        """Return the sums of products of each row, for both halves of the outputs."""
        builder = self._builder
        sums = [[cgutils.alloca_once(builder, WORDS) for _ in _HALVES] for _ in range(ROWS)]
        for total in itertools.chain(*sums):
            builder.store(ir.Constant(WORDS, None), total)
        with cgutils.for_range(builder, INT(2)) as loop:
            words_of = self._block.numbers.words(loop.index)
            begin = builder.add(self._inputs, builder.mul(loop.index, INT(4 * PAIRS)))
            for pair in range(PAIRS):
                numbers = [builder.bitcast(words, WORDS) for words in words_of(pair)]
                for row, of_row in enumerate(sums):
                    factors = self._spread(begin, row, 4 * pair, WORD, WORDS)
                    for total, words in zip(of_row, numbers, strict=True):
                        builder.store(add_words(builder, builder.load(total), words, factors), total)
        return [[builder.load(total) for total in of_row] for of_row in sums]

    def _spread(self, begin, row: int, offset: int, kind, vector):
        return spread(self._builder, load_at(self._builder, begin, WORDS_BYTES * row + offset, kind), vector)
