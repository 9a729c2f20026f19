"""The products of rows of activations in 8 bits and blocks of few bits.

Numbers of the weights are bytes without a sign. The products of both are added in integers of 32 bits, exactly, and
then scaled: a row gets the same bits whatever the others are. AVX-512 VNNI and i8mm of Arm multiply four pairs of bytes
in each lane and add them with one instruction; other processors multiply words, and find the same integers.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from llvmlite import ir

from handlers.cpu_kernels import byte_products
from handlers.cpu_kernels.blocks.laid import HALVES, Form, in_sections, multiplying_stored
from handlers.cpu_kernels.blocks.layout import GROUP, KINDS, OUTPUTS, QUADS, Kind
from handlers.cpu_kernels.blocks.numbers import AHEAD_BYTES, AHEAD_OF_ONE_ROW
from handlers.cpu_kernels.blocks.reading import Block, is_read
from handlers.cpu_kernels.blocks.vectors import HALF, WORDS, shuffled
from handlers.cpu_kernels.byte_products import add_byte_products
from handlers.cpu_kernels.int8.quantising import QUANTISED_BYTES, SCALE_AT, SUM_AT, begin_at
from handlers.cpu_kernels.intrinsics import LANES

_HAS_INSTRUCTION = byte_products.HAS_VNNI or byte_products.HAS_I8MM
ROWS = 4 if _HAS_INSTRUCTION else 1  # words of several rows would not stay in registers
"""How many rows are a group, which is multiplied at once."""
_SECTION = 12  # blocks, at most, that are laid


def multiplies(kind: Kind) -> bool:
    """Whether activations in 8 bits multiply blocks of a kind."""
    return is_read(kind) and not kind.has_codebook and (kind.bits < 8 or kind.has_quads)


def _numbers(builder, block: Block, group):
    """Yield the numbers of each quad of a group, those of both halves of the outputs."""
    numbers = block.numbers
    if block.kind.has_quads:
        for quad in range(QUADS):
            yield [numbers.quad(group, quad, half) for half in HALVES]
        return
    quarters = [numbers.nibbles_of(group, quarter) for quarter in range(4)]
    for first in range(2):
        for place in range(2):
            lanes = range(place, 2 * LANES, 2)
            of_quarters = [pairs[first] for pairs in quarters]
            halves = zip(of_quarters[::2], of_quarters[1::2], strict=True)
            yield [shuffled(builder, one, other, lanes) for one, other in halves]


def _add(builder, total, numbers, factors):
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


def _ahead_of_one_row(kind: Kind) -> int:
    """Blocks of 6 bits are not read in the order of their bytes: an AMD EPYC took 1.5 times as long without asking."""
    return AHEAD_BYTES if kind.bits == 6 else AHEAD_OF_ONE_ROW


_KINDS = [kind for kind in KINDS if multiplies(kind)]
_FORM = Form(_KINDS, QUADS, _numbers, _add, QUANTISED_BYTES, SCALE_AT, SUM_AT, begin_at)
multiply_stored = multiplying_stored(_FORM, 1, _ahead_of_one_row)
add_products, LAID_BYTES = in_sections(_FORM, ROWS, 1, _SECTION)
assert QUADS == GROUP // 4
assert 2 * LANES == OUTPUTS
