"""Unpacks blocks of few bits (see layout.py) to the weights of a panel, for many rows of activations."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from handlers.cpu_kernels.blocks.layout import INPUTS, KINDS, OUTPUTS
from handlers.cpu_kernels.blocks.reading import Block, block_at, for_kind
from handlers.cpu_kernels.blocks.vectors import FLOATS, INT, PAIRS, QUARTERS, WORDS, multiply_add, shuffled, store_at
from handlers.cpu_kernels.intrinsics import LANES, BFloat16


@intrinsic
def unpack(context, code, panel, first, blocks, target, line, like):
    """Write the weights of blocks `first` to `first + blocks` - 1 of a panel of a kind.

    panel, target: addresses; code, first, blocks, line: numbers. They go to the target as elements of the type of
    `like`, for each word of one or two inputs OUTPUTS words, `line` bytes behind those of the word before. A float32
    is rounded once; bfloat16 is for processors that convert to it.
    """
    write = _write_floats if like == types.float32 else _write_words
    words = INPUTS if like == types.float32 else INPUTS // 2

    def build(ctx, builder, sig, args):
        code, panel, first, blocks, target, line, _ = args
        size = builder.mul(line, INT(words))

        def of_kind(kind):
            with cgutils.for_range(builder, blocks) as loop:
                block = block_at(builder, kind, panel, builder.add(first, loop.index))
                out = builder.add(target, builder.mul(loop.index, size))
                _unpack(builder, block, out, line, write, words // 2)

        for_kind(builder, code, of_kind, KINDS)
        return ctx.get_dummy_value()

    given = types.int64, types.uintp, types.intp, types.intp, types.uintp, types.intp
    return types.void(*given, like), build


def _unpack(builder, block: Block, out, line, write, words: int) -> None:
    """Write the weights of a block to an address; `words`: of a group."""
    quarters = range(QUARTERS)
    minima = [block.scales.minima_of_quarter(quarter) for quarter in quarters] if block.kind.has_minimum else None
    # LLVM would read what the groups share once for each of them: it takes the stores for such as might change it.
    shared = [block.scales.of_quarter(quarter, INT(0)) for quarter in quarters] if block.kind.scales == 1 else None
    with cgutils.for_range(builder, INT(2)) as loop:
        scales = shared or [block.scales.of_quarter(quarter, loop.index) for quarter in quarters]
        numbers_of = block.numbers.pairs(loop.index)
        begin = builder.add(out, builder.mul(line, builder.mul(loop.index, INT(words))))
        for pair in range(PAIRS):
            numbers = numbers_of(pair)
            if minima is None:
                weights = [builder.fmul(number, scale) for number, scale in zip(numbers, scales, strict=True)]
            else:
                terms = zip(numbers, scales, minima, strict=True)
                weights = [multiply_add(builder, number, scale, less) for number, scale, less in terms]
            for half in range(2):
                write(builder, weights[2 * half : 2 * half + 2], begin, line, pair, 4 * LANES * half)


def _write_words(builder, weights, begin, line, pair: int, offset: int) -> None:
    """Write one line of words of bfloat16, rounded to nearest."""
    name, kind = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(BFloat16(), 2 * LANES)
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, (FLOATS, FLOATS)), name)
    rounded = builder.call(function, weights[::-1])  # the first operand becomes the upper half
    store_at(builder, builder.bitcast(rounded, WORDS), builder.add(begin, builder.mul(line, INT(pair))), offset)


def _write_floats(builder, weights, begin, line, pair: int, offset: int) -> None:
    """Write two lines of float32: of the first inputs, and of the second ones."""
    for place in range(2):
        floats = shuffled(builder, weights[0], weights[1], range(place, 2 * LANES, 2))
        store_at(builder, floats, builder.add(begin, builder.mul(line, INT(2 * pair + place))), offset)


assert OUTPUTS == 2 * LANES
