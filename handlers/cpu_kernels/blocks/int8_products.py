"""The products of rows of activations in 8 bits and blocks of few bits.

The 32 inputs of a block take 8 bits each, with one scale in float32: the greatest magnitude over 127. Numbers are bytes
without a sign: the products of both are added in integers of 32 bits, exactly, and then scaled. So a row gets the same
bits whatever the others are. AVX-512 VNNI and i8mm of Arm multiply four pairs of bytes in each lane and add them with
one instruction; other processors multiply words, and find the same integers.

Four inputs that a lane adds up are a quad. Quad 4 * g + q of a block has inputs q, q + 4, q + 8 and q + 12 of group g,
which is the order that numbers of 4 bits have in their words (see layout.py).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from handlers.cpu_kernels import byte_products
from handlers.cpu_kernels.blocks.layout import GROUP, INPUTS, KINDS, QUADS, Kind
from handlers.cpu_kernels.blocks.reading import Block, block_at, for_kind
from handlers.cpu_kernels.blocks.vectors import (
    BYTE,
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
from handlers.cpu_kernels.intrinsics import LANES, spread

_HAS_INSTRUCTION = byte_products.HAS_VNNI or byte_products.HAS_I8MM
QUANTISED_BYTES = 64
"""Of the inputs of a block as `quantise` writes them: a line of the caches."""
ROWS = 4
"""How many rows `multiply_quantised` multiplies at once."""
_SCALE_AT, _SCALED_SUM_AT, _SUM_AT, _SUMS_OF_GROUPS_AT = 32, 36, 40, 44
_GREATEST = 127.0
_MIN = 2.0**-100  # below it, the inverse of a scale would be infinite
_HALVES = range(2)  # of the outputs

_ORDER = [GROUP * group + quad + 4 * place for group in range(2) for quad in range(4) for place in range(4)]
_INPUT_WORDS, _INPUT_FLOATS = ir.VectorType(WORD, INPUTS), ir.VectorType(FLOAT, INPUTS)


def multiplies(kind: Kind) -> bool:
    """Whether activations in 8 bits multiply blocks of a kind."""
    return not kind.has_codebook and (kind.bits < 8 or kind.has_quads)


@intrinsic
def quantise(context, source, target, like):
    """Write a block's inputs in 8 bits: source, the address of INPUTS elements of the type of `like`, to a target.

    An infinity or a NaN makes the scale, and so all sums of its row, NaN.
    """

    def build(ctx, builder, sig, args):
        source, target, _ = args
        floats = _floats_at(builder, source, like)
        greatest = _reduced(builder, "fmax", builder.call(_of_floats(builder, "fabs"), [floats]))
        greatest = builder.select(builder.fcmp_ordered(">", greatest, FLOAT(_MIN)), greatest, FLOAT(_MIN))
        inverse = builder.fdiv(FLOAT(_GREATEST), greatest)
        scaled = builder.fmul(floats, spread(builder, inverse, _INPUT_FLOATS))
        # Zero times an infinity or a NaN is NaN, and a sum with one, too.
        lost = _sum_of_zeros(builder, floats)
        numbers = builder.fptosi(builder.call(_of_floats(builder, "rint"), [_finite(builder, scaled)]), _INPUT_WORDS)
        scale = builder.fadd(builder.fdiv(greatest, FLOAT(_GREATEST)), lost)
        in_order = builder.shuffle_vector(numbers, numbers, ir.Constant(_INPUT_WORDS, _ORDER))
        store_at(builder, builder.trunc(in_order, ir.VectorType(BYTE, INPUTS)), target, 0)
        sums = [_reduced(builder, "add", part) for part in _by_group(builder, numbers)]
        total = builder.add(*sums)
        store_at(builder, scale, target, _SCALE_AT)
        store_at(builder, builder.fmul(scale, builder.sitofp(total, FLOAT)), target, _SCALED_SUM_AT)
        store_at(builder, total, target, _SUM_AT)
        for group, part in enumerate(sums):
            store_at(builder, part, target, _SUMS_OF_GROUPS_AT + 4 * group)
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.uintp, like), build


def _floats_at(builder, source, like):
    if like == types.float32:
        return load_at(builder, source, 0, _INPUT_FLOATS)
    stored = load_at(builder, source, 0, ir.VectorType(HALF, INPUTS))
    bits = builder.shl(builder.zext(stored, _INPUT_WORDS), ir.Constant(_INPUT_WORDS, [16] * INPUTS))
    return builder.bitcast(bits, _INPUT_FLOATS)


def _of_floats(builder, name: str):
    kind = ir.FunctionType(_INPUT_FLOATS, [_INPUT_FLOATS])
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{INPUTS}f32")


def _sum_of_zeros(builder, floats):
    """Return zero, or NaN if one of the inputs is an infinity or a NaN."""
    zeros = builder.fmul(floats, ir.Constant(_INPUT_FLOATS, [0.0] * INPUTS))
    kind = ir.FunctionType(FLOAT, [FLOAT, _INPUT_FLOATS])
    add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{INPUTS}f32")
    return builder.call(add, [FLOAT(0.0), zeros], fastmath=("reassoc",))


def _finite(builder, scaled):
    """Return what becomes an integer up to _GREATEST; zero in place of others, which no integer can be made of."""
    limit = ir.Constant(_INPUT_FLOATS, [_GREATEST + 0.5] * INPUTS)
    magnitude = builder.call(_of_floats(builder, "fabs"), [scaled])
    return builder.select(builder.fcmp_ordered("<=", magnitude, limit), scaled, ir.Constant(_INPUT_FLOATS, None))


def _by_group(builder, numbers):
    for group in range(INPUTS // GROUP):
        places = range(GROUP * group, GROUP * (group + 1))
        yield builder.shuffle_vector(numbers, numbers, ir.Constant(ir.VectorType(WORD, GROUP), list(places)))


def _reduced(builder, operation: str, vector):
    element = vector.type.element
    name = f"llvm.vector.reduce.{operation}.v{vector.type.count}{'f32' if element == FLOAT else 'i32'}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(element, [vector.type]), name)
    return builder.call(function, [vector])


@intrinsic
def multiply_quantised(context, code, panel, first, blocks, rows, stride, count, sums):
    """Add the products of rows and blocks `first` to `first + blocks` - 1 of the panel of a kind to `sums`.

    panel: an address. rows: the address of what `quantise` wrote of the first of these blocks, `stride` bytes before
    that of the next row. sums: the address of OUTPUTS float32 for each row. `count` is 1, or up to ROWS.
    """

    def build(ctx, builder, sig, args):
        code, panel, first, blocks, rows, stride, count, sums = args

        def of_kind(kind):
            if not _HAS_INSTRUCTION:  # words of several rows would not stay in registers
                with cgutils.for_range(builder, count) as loop:
                    row = builder.add(rows, builder.mul(stride, loop.index))
                    target = builder.add(sums, builder.mul(INT(8 * LANES), loop.index))
                    _multiply(builder, kind, (panel, first, blocks), [row], [target])
                return
            with builder.if_else(builder.icmp_signed("==", count, INT(1))) as (one, several):
                with one:
                    _multiply(builder, kind, (panel, first, blocks), [rows], [sums])
                with several:
                    last = builder.sub(count, INT(1))
                    places = [_smaller(builder, INT(row), last) for row in range(ROWS)]
                    begins = [builder.add(rows, builder.mul(stride, place)) for place in places]
                    targets = [builder.add(sums, builder.mul(INT(8 * LANES), place)) for place in places]
                    _multiply(builder, kind, (panel, first, blocks), begins, targets)

        for_kind(builder, code, of_kind, [kind for kind in KINDS if multiplies(kind)])
        return ctx.get_dummy_value()

    given = types.int64, types.uintp, types.intp, types.intp, types.uintp, types.intp, types.intp, types.uintp
    return types.void(*given), build


def _smaller(builder, one, other):
    return builder.select(builder.icmp_signed("<", one, other), one, other)


def _multiply(builder, kind: Kind, part, rows, sums) -> None:
    """Multiply rows at addresses. Rows past the last one are that one again: they have its sums."""
    panel, first, blocks = part
    totals = [[cgutils.alloca_once(builder, FLOATS) for _ in _HALVES] for _ in rows]
    for of_row, source in zip(totals, sums, strict=True):
        for half, total in enumerate(of_row):
            builder.store(load_at(builder, source, 4 * LANES * half, FLOATS), total)
    with cgutils.for_range(builder, blocks) as loop:
        block = block_at(builder, kind, panel, builder.add(first, loop.index))
        offset = builder.mul(loop.index, INT(QUANTISED_BYTES))
        inputs = [builder.add(row, offset) for row in rows]
        of_groups = [range(INPUTS // GROUP)] if kind.scales == 1 else [[0], [1]]
        for groups in of_groups:
            _Products(builder, block, groups, inputs).add_to(totals)
    for of_row, target in zip(totals, sums, strict=True):
        for half, total in enumerate(of_row):
            store_at(builder, builder.load(total), target, 4 * LANES * half)


class _Products:
    """The products of rows and those groups of a block that have one scale."""

    def __init__(self, builder, block: Block, groups, inputs) -> None:
        self._builder, self._block, self._groups, self._inputs = builder, block, list(groups), inputs
        is_part = len(self._groups) < INPUTS // GROUP
        self._sum_at = _SUMS_OF_GROUPS_AT + 4 * self._groups[0] if is_part else _SUM_AT

    def add_to(self, totals) -> None:
        """Add them to totals of each row, a vector for each half of the outputs."""
        builder, kind, scales = self._builder, self._block.kind, self._block.scales
        sums = [self._begin(inputs) for inputs in self._inputs]
        for group in self._groups:
            for quad, numbers in self._quads(group):
                for inputs, of_row in zip(self._inputs, sums, strict=True):
                    factors = self._spread(inputs, 4 * (4 * group + quad), WORD, WORDS)
                    for half in _HALVES:
                        of_row[half] = self._added(of_row[half], numbers[half], factors)
        of_outputs = [scales.of_half(half, self._groups[0]) for half in _HALVES]
        minima = [builder.fneg(scales.minima_of_half(half)) for half in _HALVES] if kind.has_minimum else None
        for inputs, of_row, of_totals in zip(self._inputs, sums, totals, strict=True):
            scale = self._spread(inputs, _SCALE_AT, FLOAT, FLOATS)
            for half, total in enumerate(of_totals):
                scaled = builder.fmul(builder.sitofp(of_row[half], FLOATS), of_outputs[half])
                found = multiply_add(builder, scaled, scale, builder.load(total))
                if minima is not None:
                    less = self._spread(inputs, _SCALED_SUM_AT, FLOAT, FLOATS)
                    found = multiply_add(builder, minima[half], less, found)
                builder.store(found, total)

    def _begin(self, inputs):
        """Return the sums of a row without products: numbers are greater by `zero` than what they stand for."""
        zero = self._block.kind.zero
        if not zero:
            return [ir.Constant(WORDS, None) for _ in _HALVES]
        total = load_at(self._builder, inputs, self._sum_at, WORD)
        return [spread(self._builder, self._builder.mul(total, WORD(-zero)), WORDS)] * 2

    def _quads(self, group: int):
        """Yield the quads of a group: their number, and the numbers of both halves of the outputs."""
        numbers = self._block.numbers
        if self._block.kind.has_quads:
            for quad in range(QUADS):
                yield quad, [numbers.quad(QUADS * group + quad, half) for half in _HALVES]
            return
        quarters = [numbers.nibbles_of(INT(group), quarter) for quarter in range(4)]
        for first in range(2):
            for place in range(2):
                lanes = range(place, 2 * LANES, 2)
                of_quarters = [pairs[first] for pairs in quarters]
                halves = zip(of_quarters[::2], of_quarters[1::2], strict=True)
                yield 2 * first + place, [shuffled(self._builder, one, other, lanes) for one, other in halves]

    def _added(self, total, numbers, factors):
        if _HAS_INSTRUCTION:
            return add_byte_products(self._builder, total, numbers, factors, "second")
        return _add_in_words(self._builder, total, numbers, factors)

    def _spread(self, address, offset: int, kind, vector):
        return spread(self._builder, load_at(self._builder, address, offset, kind), vector)


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
