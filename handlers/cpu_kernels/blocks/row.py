"""The product of one row of activations and blocks of few bits, in vector registers.

Nothing that is unpacked goes through memory, so that one row takes about as long as reading its weights. The sums have
the bits that tile registers give: these add up the products of even and of odd inputs apart (see TDPBF16PS in Intel's
manual of instructions), and products of bfloat16 are exact in float32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from handlers.cpu_kernels.blocks.layout import INPUTS, OUTPUTS
from handlers.cpu_kernels.blocks.products import multiply_add_floats
from handlers.cpu_kernels.blocks.unpacking import AHEAD_BYTES, load_at, store_at, widened
from handlers.cpu_kernels.intrinsics import LANES, prefetch_line, spread

_INT, _WORD, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
_WORDS, _FLOATS = ir.VectorType(_WORD, LANES), ir.VectorType(_FLOAT, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_PARTS = range(0, OUTPUTS, LANES)


@intrinsic
def multiply_row_of_eight(context, row, source, skipped, blocks, stride, totals):
    """Add the scaled products of a row and blocks with numbers of 8 bits to `totals`, a float32 for each output.

    row: the address of the first block's inputs in float32, source: of the first block, whose next one is `stride`
    bytes further. Numbers are `skipped` bytes behind its beginning, where its scales are. For AVX-512.
    """

    def build(ctx, builder, sig, args):
        def numbers(block, pair, place):
            if not place:
                prefetch_line(builder, builder.add(block, _INT(AHEAD_BYTES + 2 * pair * OUTPUTS)))
            return [widened(builder, block, (2 * pair + place) * OUTPUTS + part) for part in _PARTS]

        _multiply_row(builder, args, numbers)
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.intp, types.intp, types.intp, types.uintp), build


@intrinsic
def multiply_row_of_four(context, row, source, skipped, blocks, stride, totals, zero):
    """Do what `multiply_row_of_eight` does for numbers of 4 bits, less `zero`, which is 0 or 8."""

    def build(ctx, builder, sig, args):
        table = builder.select(builder.icmp_signed("==", args[6], _INT(0)), _table(0), _table(8))
        look_up = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_FLOATS, (_FLOATS, _WORDS)), "llvm.x86.avx512.permvar.sf.512"
        )
        loaded = {}

        def numbers(block, pair, place):
            found = []
            for part in _PARTS:
                offset = pair // 4 * 4 * OUTPUTS + 4 * part
                if pair % 4 == 0 and not place:
                    prefetch_line(builder, builder.add(block, _INT(AHEAD_BYTES + offset)))
                    loaded[part] = load_at(builder, block, offset, _WORDS)
                shift = ir.Constant(_WORDS, [4 * (pair % 4) + 16 * place] * LANES)
                # It takes the lowest four bits of each word.
                found.append(builder.call(look_up, (table, builder.lshr(loaded[part], shift))))
            return found

        _multiply_row(builder, args[:6], numbers)
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.intp, types.intp, types.intp, types.uintp, types.intp), build


def _multiply_row(builder, args, numbers):
    """Write the loop over blocks; `numbers(block, pair, place)` gives those of an input for all outputs as float32."""
    row, source, skipped, blocks, stride, totals = args
    kept = [cgutils.alloca_once_value(builder, load_at(builder, totals, 4 * part, _FLOATS)) for part in _PARTS]
    with cgutils.for_range(builder, blocks) as loop:
        begin = builder.add(source, builder.mul(loop.index, stride))
        inputs = builder.add(row, builder.mul(loop.index, _INT(4 * INPUTS)))
        block = builder.add(begin, skipped)
        sums = [[ir.Constant(_FLOATS, None) for _ in _PARTS] for _ in range(2)]
        for pair in range(INPUTS // 2):
            for place in range(2):
                factor = spread(builder, load_at(builder, inputs, 4 * (2 * pair + place), _FLOAT), _FLOATS)
                sums[place] = [
                    multiply_add_floats(builder, number, factor, total)
                    for number, total in zip(numbers(block, pair, place), sums[place], strict=True)
                ]
        for part, even, odd, total in zip(_PARTS, *sums, kept, strict=True):
            scale = builder.fpext(load_at(builder, begin, 2 * part, _HALVES), _FLOATS)
            added = multiply_add_floats(builder, builder.fadd(even, odd), scale, builder.load(total))
            builder.store(added, total)
    for part, total in zip(_PARTS, kept, strict=True):
        store_at(builder, builder.load(total), totals, 4 * part)


def _table(zero):
    return ir.Constant(_FLOATS, [float(number - zero) for number in range(LANES)])
