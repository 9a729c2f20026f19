"""Unpacks blocks of few bits (see layout.py) to the weights of a panel, for many rows of activations.

In bfloat16 the first rows are multiplied meanwhile, by what registers have just unpacked: products take two of the four
units of an AMD EPYC (Zen 4) for vectors, and unpacking mostly takes the others. The other rows are multiplied by what
was written. With 32 rows, layers of SmolLM2-135M took 1.05 to 1.2 times as long if all was unpacked before
(`python -m benchmarks.block_linears --unpacked`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from handlers.cpu_kernels.blocks.layout import INPUTS, KINDS, OUTPUTS
from handlers.cpu_kernels.blocks.reading import Block, block_at, for_kind
from handlers.cpu_kernels.blocks.vectors import (
    FLOATS,
    INT,
    PAIRS,
    QUARTERS,
    WORD,
    WORDS,
    load_at,
    multiply_add,
    shuffled,
    store_at,
)
from handlers.cpu_kernels.intrinsics import LANES, BFloat16, host_has
from handlers.cpu_kernels.intrinsics import multiply_add as add_products

ROWS, FEWER_ROWS = 8, 4
"""How many rows of bfloat16 are multiplied at once, and how many if no more are left."""
_VECTOR = 4 * LANES  # bytes
_HALVES = range(2)  # of the outputs
if host_has("avx512bf16"):
    llvmlite.binding.initialize_native_asmparser()  # numba itself writes no assembly


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

    def use(group, pair: int, weights) -> None:
        begin = builder.add(out, builder.mul(line, builder.mul(group, INT(words))))
        for half in _HALVES:
            write(builder, weights[2 * half : 2 * half + 2], begin, line, pair, _VECTOR * half)

    _unpack_pairs(builder, block, use)


def _unpack_pairs(builder, block: Block, use: Callable[..., None], again: Block | None = None) -> None:
    """Call `use(group, pair, weights)` for each pair of a block, whose weights are those of the quarters in float32.

    The numbers of a group stay in registers; or for each pair but the first one they are read `again`.
    """
    quarters = range(QUARTERS)
    minima = [block.scales.minima_of_quarter(quarter) for quarter in quarters] if block.kind.has_minimum else None
    # LLVM would read what the groups share once for each of them: it takes the stores for such as might change it.
    shared = [block.scales.of_quarter(quarter, INT(0)) for quarter in quarters] if block.kind.scales == 1 else None
    with cgutils.for_range(builder, INT(2)) as loop:
        scales = shared or [block.scales.of_quarter(quarter, loop.index) for quarter in quarters]
        numbers_of = block.numbers.pairs(loop.index)
        for pair in range(PAIRS):
            if again is not None and pair:
                numbers_of = again.numbers.pairs(_unknown(builder, loop.index))
            numbers = numbers_of(pair)
            if minima is None:
                weights = [builder.fmul(number, scale) for number, scale in zip(numbers, scales, strict=True)]
            else:
                terms = zip(numbers, scales, minima, strict=True)
                weights = [multiply_add(builder, number, scale, less) for number, scale, less in terms]
            use(loop.index, pair, weights)


def _unknown(builder, number):
    """Return a number that LLVM takes for a new one: it would keep in registers what follows from the same one."""
    return builder.asm(ir.FunctionType(INT, [INT]), "", "=r,0", [number], True)


def _write_words(builder, weights, begin, line, pair: int, offset: int) -> None:
    """Write one line of words of bfloat16."""
    store_at(builder, _rounded(builder, weights), builder.add(begin, builder.mul(line, INT(pair))), offset)


def _rounded(builder, weights):
    """Return the weights of two quarters as words of bfloat16, rounded to nearest."""
    name, kind = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(BFloat16(), 2 * LANES)
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, (FLOATS, FLOATS)), name)
    return builder.bitcast(builder.call(function, weights[::-1]), WORDS)  # the first operand becomes the upper half


def _write_floats(builder, weights, begin, line, pair: int, offset: int) -> None:
    """Write two lines of float32: of the first inputs, and of the second ones."""
    for place in range(2):
        floats = shuffled(builder, weights[0], weights[1], range(place, 2 * LANES, 2))
        store_at(builder, floats, builder.add(begin, builder.mul(line, INT(2 * pair + place))), offset)


# --- products of rows of bfloat16 ---


class _Tile:
    """The sums of rows and a panel, at an address, which are in registers from its first product to `write`.

    inputs: the address of the first row's words, whose next rows are `stride` bytes apart.
    """

    def __init__(self, builder, rows: int, inputs, stride, sums) -> None:
        self._builder, self._address = builder, sums
        self._rows = [builder.add(inputs, builder.mul(stride, INT(row))) for row in range(rows)]
        self._sums = [cgutils.alloca_once(builder, FLOATS) for _ in range(2 * rows)]
        for place, total in enumerate(self._sums):
            builder.store(load_at(builder, sums, _VECTOR * place, FLOATS), total)

    def add(self, offset, vectors) -> None:
        """Add the products of a word of each row, some bytes behind its beginning, and vectors for both halves."""
        builder = self._builder
        for row, address in enumerate(self._rows):
            factors = _spread_word(builder, builder.add(address, offset))
            for vector, total in zip(vectors, self._sums[2 * row : 2 * row + 2], strict=True):
                builder.store(add_products(builder, factors, vector, builder.load(total), types.uint16), total)

    def write(self) -> None:
        for place, total in enumerate(self._sums):
            store_at(self._builder, self._builder.load(total), self._address, _VECTOR * place)


def _spread_word(builder, address):
    """Return a vector with the word at an address in every lane.

    Of two instructions that do this LLVM takes vbroadcastss, for which an AMD EPYC (Zen 4) needs the units of products:
    32 rows took 1.03 to 1.07 times as long. That this has side effects keeps LLVM from unpacking all pairs first.
    """
    pointer = builder.inttoptr(address, WORD.as_pointer())
    instruction = ir.InlineAsm(ir.FunctionType(WORDS, [pointer.type]), "vpbroadcastd $1, $0", "=v,*m", side_effect=True)
    return builder.call(instruction, [pointer], attrs=("nounwind",), arg_attrs={0: ("elementtype",)})


@intrinsic
def unpack_and_multiply(context, code, panel, first, blocks, target, inputs, stride, sums):
    """Do what `unpack` does in bfloat16, and add the products of ROWS rows and these weights to `sums`.

    inputs: the address of what the first row has for the first of these blocks; rows are `stride` bytes apart. sums: an
    address of OUTPUTS float32 for each row. Lines of the target follow each other.
    """

    def build(ctx, builder, sig, args):
        code, panel, first, blocks, target, *rows = args

        def of_kind(kind):
            tile = _Tile(builder, ROWS, *rows)
            with cgutils.for_range(builder, blocks) as loop:
                number = builder.add(first, loop.index)
                block, again = block_at(builder, kind, panel, number), block_at(builder, kind, panel, number, 0)
                begin = builder.mul(loop.index, INT(2 * INPUTS))

                def use(group, pair: int, weights) -> None:
                    vectors = [_rounded(builder, weights[2 * half : 2 * half + 2]) for half in _HALVES]
                    offset = builder.add(begin, builder.mul(group, INT(INPUTS)))
                    line = builder.add(target, builder.mul(offset, INT(OUTPUTS)))
                    for half in _HALVES:
                        store_at(builder, vectors[half], line, _VECTOR * (2 * pair + half))
                    tile.add(builder.add(offset, INT(4 * pair)), vectors)

                _unpack_pairs(builder, block, use, again if kind.bits == 4 else None)
            tile.write()

        for_kind(builder, code, of_kind, KINDS)
        return ctx.get_dummy_value()

    given = types.int64, types.uintp, types.intp, types.intp, types.uintp, types.uintp, types.intp, types.uintp
    return types.void(*given), build


def _multiplying_unpacked(rows: int) -> Any:
    """Return the intrinsic that multiplies so many rows by what `unpack_and_multiply` has written."""

    @intrinsic
    def multiply_unpacked(context, words, source, inputs, stride, sums):
        """Add the products of rows and as many `words` from the address `source` on to `sums`."""

        def build(ctx, builder, sig, args):
            words, source, *given = args
            tile = _Tile(builder, rows, *given)
            with cgutils.for_range(builder, words) as loop:
                line = builder.add(source, builder.mul(loop.index, INT(4 * OUTPUTS)))
                vectors = [load_at(builder, line, _VECTOR * half, WORDS) for half in _HALVES]
                tile.add(builder.mul(loop.index, INT(4)), vectors)
            tile.write()
            return ctx.get_dummy_value()

        return types.void(types.intp, types.uintp, types.uintp, types.intp, types.uintp), build

    return multiply_unpacked


multiply_unpacked, multiply_fewer = _multiplying_unpacked(ROWS), _multiplying_unpacked(FEWER_ROWS)
assert OUTPUTS == 2 * LANES
