"""Vectors that kernels of blocks load, join and store: their types, and the instructions that products share.

A vector has pairs of neighbouring inputs in 8 outputs, one output after the other, which is what one instruction makes
words of bfloat16 of. A quarter is 8 of the 32 outputs.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from handlers.cpu_kernels.blocks.layout import GROUP, INPUTS
from handlers.cpu_kernels.intrinsics import LANES

PAIRS, QUARTERS = GROUP // 2, 4
"""How many pairs of inputs a group has, and how many quarters the outputs."""
INT, WORD, HALF, BYTE, FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8), ir.FloatType()
WORDS, FLOATS = ir.VectorType(WORD, LANES), ir.VectorType(FLOAT, LANES)


def load_at(builder, address, offset: int, kind):
    """Return the vector at an address and some bytes."""
    place = builder.inttoptr(builder.add(address, INT(offset)), kind.as_pointer())
    return builder.load(place, align=1)


def store_at(builder, vector, address, offset: int) -> None:
    place = builder.inttoptr(builder.add(address, INT(offset)), vector.type.as_pointer())
    builder.store(vector, place, align=4)


def shuffled(builder, one, other, order: Sequence[int]):
    """Return the lanes of two vectors, one behind the other, in an order."""
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(WORD, len(order)), list(order)))


def multiply_add(builder, one, other, total):
    """Return `one * other + total`, rounded once where the processor can."""
    product = builder.fmul(one, other, flags=("contract",))
    return builder.fadd(product, total, flags=("contract",))


def scaled(builder, sums, scales, minima, of_inputs):
    """Return sums of products of integers as float32, scaled. Minima, or None, have their sign changed."""
    found = builder.fmul(builder.sitofp(sums, FLOATS), scales)
    return found if minima is None else multiply_add(builder, minima, of_inputs, found)


def in_all_lanes(number: int):
    """Return a constant vector of words."""
    return ir.Constant(WORDS, [number] * LANES)


assert INPUTS == 2 * GROUP
