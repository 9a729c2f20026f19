"""The products of attention for one query token: with keys, and of weights with values.

Both read memory row by row, where the tokens of a slot are. Loops in numba's own language would leave it to LLVM which
sums stay in registers.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from handlers.cpu_kernels.intrinsics import LANES, host_has, multiply_add, prefetch_line, spread

HAS_MANY_REGISTERS = host_has("avx512f")
"""Whether `dots` and the sums of several heads fit into the vector registers.

With the 16 half as long registers of AVX2, `dots` took a third longer than `dot`, and sums of three heads a tenth.
"""

_INT, _FLOAT, _WORD = ir.IntType(64), ir.FloatType(), ir.IntType(32)
_WORDS, _SUMS = ir.VectorType(_WORD, LANES), ir.VectorType(_FLOAT, LANES)


@intrinsic
def dot(context, left, left_row, right, right_row, vectors):
    """Return the product of the first elements of two rows, as float32: 16 words (see `word`) for each of `vectors`.

    left, right: contiguous arrays of two dimensions whose elements have the same type. Nothing is checked.
    """
    like = left.dtype

    def build(ctx, builder, sig, args):
        one, other = (_row(ctx, builder, sig, args, place) for place in (0, 2))
        total = cgutils.alloca_once_value(builder, ir.Constant(_SUMS, None))
        with cgutils.for_range(builder, args[4]) as loop:
            offset = builder.mul(loop.index, _INT(4 * LANES))
            left, right = (_loaded(builder, builder.add(begin, offset), _WORDS) for begin in (one, other))
            builder.store(multiply_add(builder, left, right, builder.load(total), like), total)
        kind = ir.FunctionType(_FLOAT, [_FLOAT, _SUMS])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
        return builder.call(function, [_FLOAT(0), builder.load(total)], fastmath=("fast",))

    return types.float32(left, left_row, right, right_row, vectors), build


@intrinsic
def dots(context, left, left_row, right, right_row, vectors, factor, out, column):
    """Write the products of a row with LANES rows, times a factor, to `out[left_row, column:column + LANES]`.

    The rows on the right are those from `right_row` on; left and right as for `dot`; out (n, m) float32, contiguous.

    To add up the lanes of a vector takes longer than the product. Here the lanes of all LANES vectors are added up
    together, in a tree of additions that leaves one vector with a sum in each lane.
    """
    like = left.dtype

    def build(ctx, builder, sig, args):
        one, other = (_row(ctx, builder, sig, args, place) for place in (0, 2))
        stride = _stride(ctx, builder, sig, args, 2)
        begins = [builder.add(other, builder.mul(stride, _INT(row))) for row in range(LANES)]
        totals = [cgutils.alloca_once(builder, _SUMS) for _ in begins]
        for total in totals:
            builder.store(ir.Constant(_SUMS, None), total)
        with cgutils.for_range(builder, args[4]) as loop:
            offset = builder.mul(loop.index, _INT(4 * LANES))
            left = _loaded(builder, builder.add(one, offset), _WORDS)
            for begin, total in zip(begins, totals, strict=True):
                right = _loaded(builder, builder.add(begin, offset), _WORDS)
                builder.store(multiply_add(builder, left, right, builder.load(total), like), total)
        vectors = [builder.load(total) for total in totals]
        distance = 1
        while len(vectors) > 1:
            vectors = [_halved(builder, *pair, distance) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
            distance *= 2
        scaled = builder.fmul(vectors[0], spread(builder, args[5], _SUMS), flags=("fast",))
        place = builder.add(_row(ctx, builder, sig, args, 6, place=1), builder.mul(args[7], _INT(4)))
        builder.store(scaled, builder.inttoptr(place, _SUMS.as_pointer()), align=4)
        return ctx.get_dummy_value()

    return types.void(left, left_row, right, right_row, vectors, types.float32, out, column), build


def _halved(builder, one, other, distance):
    """Add up lanes that are `distance` (a power of two) apart.

    A lane of the result is a sum of `other` if its number has that bit, otherwise one of `one`.
    """

    def shuffled(lanes):
        return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_WORD, LANES), lanes))

    begins = [LANES if lane & distance else 0 for lane in range(LANES)]
    own = shuffled([begin + lane for lane, begin in enumerate(begins)])
    added = shuffled([begin + (lane ^ distance) for lane, begin in enumerate(begins)])
    return builder.fadd(own, added, flags=("fast",))


def _weighted_sum(heads, vectors):
    """Return an intrinsic for a number of heads, and for columns that fill a number of vectors."""

    @intrinsic
    def add_weighted(context, weights, row, values, first, last, sums, column):
        """Add `weights[row, t] * values[t]` for t from `first` to `last` - 1 to `sums[row]`, and so for the next rows.

        weights (n, m), sums (n, columns): float32; values (m, columns): elements. All are contiguous. Columns from
        `column` on are added. There are as many rows, which are heads, and columns as this function is for. The heads
        share what it costs to read a value and make a float32 of it. Nothing is checked.
        """
        element = values.dtype

        def build(ctx, builder, sig, args):
            size = element.bitwidth // 8
            weight, of_head = _row(ctx, builder, sig, args, 0), _stride(ctx, builder, sig, args, 0)
            weights = [builder.add(weight, builder.mul(of_head, _INT(head))) for head in range(heads)]
            target = builder.add(_row(ctx, builder, sig, args, 5, place=1), builder.mul(args[6], _INT(4)))
            of_head = _stride(ctx, builder, sig, args, 5)
            places = [
                builder.add(target, builder.add(builder.mul(of_head, _INT(head)), _INT(4 * LANES * vector)))
                for head in range(heads)
                for vector in range(vectors)
            ]
            totals = [cgutils.alloca_once(builder, _SUMS) for _ in places]
            for place, total in zip(places, totals, strict=True):
                builder.store(_loaded(builder, place, _SUMS), total)
            value = ctx.make_array(sig.args[2])(ctx, builder, args[2])
            begin = builder.add(builder.ptrtoint(value.data, _INT), builder.mul(args[6], _INT(size)))
            stride = _stride(ctx, builder, sig, args, 2)
            with cgutils.for_range_slice(builder, args[3], args[4], _INT(1)) as (token, _):
                line = builder.add(begin, builder.mul(token, stride))
                read = [
                    _widened(builder, builder.add(line, _INT(size * LANES * vector)), element)
                    for vector in range(vectors)
                ]
                for head, weight in enumerate(weights):
                    place = builder.add(weight, builder.mul(token, _INT(4)))
                    factor = spread(builder, builder.load(builder.inttoptr(place, _FLOAT.as_pointer())), _SUMS)
                    for vector, total in zip(read, totals[head * vectors : (head + 1) * vectors], strict=True):
                        product = builder.fmul(vector, factor, flags=("fast",))
                        builder.store(builder.fadd(product, builder.load(total), flags=("fast",)), total)
            for place, total in zip(places, totals, strict=True):
                builder.store(builder.load(total), builder.inttoptr(place, _SUMS.as_pointer()), align=4)
            return ctx.get_dummy_value()

        return types.void(weights, types.intp, values, types.intp, types.intp, sums, types.intp), build

    return add_weighted


WIDE_COLUMNS = 4 * LANES
"""How many columns `add_weighted_wide` adds. So many sums hide that an addition has to wait for the one before it."""
MAX_HEADS = 3 if HAS_MANY_REGISTERS else 1
"""For how many heads `add_weighted_wide` of that number of heads is fast."""
add_weighted = _weighted_sum(1, 1)
add_weighted_wide, add_weighted_wide_of_2, add_weighted_wide_of_3 = (_weighted_sum(heads, 4) for heads in (1, 2, 3))


@intrinsic
def prefetch(context, array, row):
    """Ask for a row of a contiguous array, which will be read soon. Where no memory is, nothing happens."""

    def build(ctx, builder, sig, args):
        begin = _row(ctx, builder, sig, args, 0)
        lines = builder.sdiv(_stride(ctx, builder, sig, args, 0), _INT(64))
        with cgutils.for_range(builder, lines) as loop:
            prefetch_line(builder, builder.add(begin, builder.mul(loop.index, _INT(64))))
        return ctx.get_dummy_value()

    return types.void(array, types.intp), build


def _row(ctx, builder, sig, args, array, place=None):
    """Return the address of a row: of the array at one place of the arguments, the number of the row is at another."""
    found = ctx.make_array(sig.args[array])(ctx, builder, args[array])
    number = args[array + 1 if place is None else place]
    offset = builder.mul(number, builder.extract_value(found.strides, 0))
    return builder.add(builder.ptrtoint(found.data, _INT), offset)


def _stride(ctx, builder, sig, args, array):
    """Return the bytes from row to row of the array at a place of the arguments."""
    return builder.extract_value(ctx.make_array(sig.args[array])(ctx, builder, args[array]).strides, 0)


def _loaded(builder, address, kind):
    """Return the vector at an address; its elements, not more, are aligned to 2 bytes."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=2)


def _widened(builder, address, element):
    """Return a vector of elements at an address as float32."""
    if element == types.float32:
        return _loaded(builder, address, _SUMS)
    wide = builder.zext(_loaded(builder, address, ir.VectorType(ir.IntType(16), LANES)), _WORDS)
    return builder.bitcast(builder.shl(wide, ir.Constant(_WORDS, [16] * LANES)), _SUMS)
