"""What numba's own language lacks for the kernels: bfloat16, words of shared memory, and products in vector registers.

Each intrinsic is a few instructions of LLVM that numba puts into the kernel. Arguments called `like` only give a type.

The docstrings are those of functions that kernels call: `load(element)`, for example. What follows in Python runs when
numba compiles, and returns the types of the call and a function that writes its LLVM instructions.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed, impl_ret_new_ref
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

LANES = 16
"""How many float32 elements a vector has. If the processor's vectors are shorter, LLVM uses several of them."""
_LINE_BYTES = 64  # of the caches


def host_has(feature: str) -> bool:
    """Whether the processor that kernels are compiled for has a feature; numba's settings may name a different one."""
    config = numba.config
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None or not config.ENABLE_AVX:
        return False
    try:
        return bool(llvmlite.binding.get_host_cpu_features().get(feature))
    except RuntimeError:  # llvmlite does not know this processor
        return False


def host_name() -> str:
    """Return LLVM's name of the processor that kernels are compiled for, in which AMD's since Zen are znver1 to 5."""
    return str(numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name())


_MULTIPLIES_BFLOAT16 = host_has("avx512bf16")
# The sums of a tile stay in vector registers: 4 by 64 of them fill 16 of the 32 registers of AVX-512, 4 by 16 fill 8 of
# the 16 of AVX2, half as long. The rest is for operands.
TILE_ROWS, TILE_COLUMNS = 4, 4 * LANES if host_has("avx512f") else LANES


@intrinsic
def load(context, element):
    """Return an element of a cache or activation as float32: bfloat16 is the upper half of a float32."""
    if element == types.float32:
        return types.float32(types.float32), lambda ctx, builder, sig, args: args[0]

    def widen(ctx, builder, sig, args):
        wide = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return types.float32(types.uint16), widen


@intrinsic
def store(context, value, like):
    """Return a float32 as an element of the type of `like`; bfloat16 is rounded to nearest, ties to even."""
    if like == types.float32:
        return types.float32(types.float32, like), lambda ctx, builder, sig, args: args[0]

    def narrow(ctx, builder, sig, args):
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        rounded = builder.add(builder.add(bits, ir.Constant(word, 0x7FFF)), odd)
        return builder.trunc(builder.lshr(rounded, ir.Constant(word, 16)), ir.IntType(16))

    return types.uint16(types.float32, like), narrow


@intrinsic
def finite(context, element):
    """Return an element, or zero in place of an infinity or NaN, whose exponent bits are all set."""
    width, exponent = (32, 0x7F800000) if element == types.float32 else (16, 0x7F80)

    def build(ctx, builder, sig, args):
        kind = ir.IntType(width)
        set_bits = builder.and_(builder.bitcast(args[0], kind), kind(exponent))
        return builder.select(builder.icmp_unsigned("==", set_bits, kind(exponent)), args[0].type(0), args[0])

    return element(element), build


@intrinsic
def larger(context, one, other):
    """Return the larger of two float32, neither NaN. Unlike `max`, which minds NaN, loops of it become vectors."""
    flags = ("nnan", "nsz")

    def build(ctx, builder, sig, args):
        return builder.select(builder.fcmp_ordered(">", *args, flags=flags), *args, flags=flags)

    return types.float32(types.float32, types.float32), build


@intrinsic
def power_of_two(context, exponent):
    """Return 2.0 ** exponent for an int32 from -126 to 127: the exponent bits of a float32."""

    def build(ctx, builder, sig, args):
        word = ir.IntType(32)
        biased = builder.add(args[0], ir.Constant(word, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(word, 23)), ir.FloatType())

    return types.float32(types.int32), build


@intrinsic
def load_acquire(context, address):
    """Return the int64 at an address in shared memory. Later reads are not moved before it (acquire order)."""

    def build(ctx, builder, sig, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.uintp), build


@intrinsic
def store_release(context, address, number):
    """Write an int64 to an address in shared memory. Earlier writes are not moved behind it (release order)."""

    def build(ctx, builder, sig, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.int64), build


@intrinsic
def array_at(context, address, like):
    """Return the array at an address, with shape, strides and type of `like`. The caller keeps its memory alive."""

    def build(ctx, builder, sig, args):
        other = ctx.make_array(sig.args[1])(ctx, builder, args[1])
        array = ctx.make_array(sig.return_type)(ctx, builder)
        data = builder.inttoptr(args[0], array.data.type)
        populate_array(array, data, other.shape, other.strides, other.itemsize, None)
        return array._getvalue()

    return like(types.uintp, like), build


@intrinsic
def empty(context, shape, kind):
    """Return a new contiguous array with elements of a type. numba compiles functions of its own for `np.empty`."""
    array = _array_of(shape, kind)
    return array(shape, kind), lambda ctx, builder, sig, args: _allocate(ctx, builder, array, shape, args[0])


@intrinsic
def zeros(context, shape, kind):
    """Return `empty` with zeros."""
    array = _array_of(shape, kind)

    def build(ctx, builder, sig, args):
        found = _allocate(ctx, builder, array, shape, args[0])
        of = ctx.make_array(array)(ctx, builder, found)
        cgutils.memset(builder, of.data, builder.mul(of.nitems, of.itemsize), 0)
        return found

    return array(shape, kind), build


def _array_of(shape, kind):
    element = kind.dtype if isinstance(kind, types.DType) else kind.instance_type
    return types.Array(element, len(shape) if isinstance(shape, types.BaseTuple) else 1, "C")


def _allocate(ctx, builder, kind, shape, given):
    """Return a new array, on a line of the caches. `shape` is the type of the shape that is given."""
    given = cgutils.unpack_tuple(builder, given) if isinstance(shape, types.BaseTuple) else [given]
    sizes = [builder.sext(size, ir.IntType(64)) for size in given]
    array = ctx.make_array(kind)(ctx, builder)
    item = ctx.get_constant(types.intp, kind.dtype.bitwidth // 8)
    strides = _contiguous(builder, sizes, item)
    meminfo = ctx.nrt.meminfo_alloc_aligned(builder, builder.mul(strides[0], sizes[0]), _LINE_BYTES)
    data = builder.bitcast(ctx.nrt.meminfo_data(builder, meminfo), array.data.type)
    populate_array(array, data, sizes, strides, item, meminfo)
    return impl_ret_new_ref(ctx, builder, kind, array._getvalue())


def _contiguous(builder, sizes, item):
    """Return the strides of a contiguous array, in bytes."""
    strides = [item]
    for size in reversed(sizes[1:]):
        strides.insert(0, builder.mul(strides[0], size))
    return strides


@intrinsic
def words_of(context, array):
    """Return a contiguous array of two dimensions as one of uint32, for `add_product`: see `word`."""

    def build(ctx, builder, sig, args):
        given = ctx.make_array(sig.args[0])(ctx, builder, args[0])
        rows, columns = cgutils.unpack_tuple(builder, given.shape)
        width = builder.sdiv(builder.mul(columns, given.itemsize), ctx.get_constant(types.intp, 4))
        return _view(ctx, builder, sig, args, (rows, width))

    return types.Array(types.uint32, 2, "C")(array), build


@intrinsic
def reshaped(context, array, shape):
    """Return a contiguous array in another shape, unchecked. `reshape` takes longer to compile."""

    def build(ctx, builder, sig, args):
        return _view(ctx, builder, sig, args, cgutils.unpack_tuple(builder, args[1]))

    return array.copy(ndim=len(shape))(array, shape), build


@intrinsic
def heads_of(context, rows, dim):
    """Return rows of heads beside each other, (n, heads * dim), as (heads, n, dim)."""

    def build(ctx, builder, sig, args):
        given = ctx.make_array(sig.args[0])(ctx, builder, args[0])
        count, width = cgutils.unpack_tuple(builder, given.shape)
        stride, size = cgutils.unpack_tuple(builder, given.strides)
        strides = (builder.mul(args[1], size), stride, size)
        return _view(ctx, builder, sig, args, (builder.sdiv(width, args[1]), count, args[1]), strides)

    return rows.copy(ndim=3, layout="A")(rows, dim), build


def _view(ctx, builder, sig, args, shape, strides=None):
    """Return the first argument's memory as an array of a shape, with strides in bytes; contiguous without strides."""
    given = ctx.make_array(sig.args[0])(ctx, builder, args[0])
    array = ctx.make_array(sig.return_type)(ctx, builder)
    size = ctx.get_constant(types.intp, sig.return_type.dtype.bitwidth // 8)
    if strides is None:
        strides = _contiguous(builder, shape, size)
    populate_array(array, builder.bitcast(given.data, array.data.type), shape, strides, size, given.meminfo)
    return impl_ret_borrowed(ctx, builder, sig.return_type, array._getvalue())


@intrinsic
def word(context, low, high):
    """Return what a lane of `add_product` multiplies at once, as uint32: two elements of bfloat16 or one of float32."""
    if low == types.float32:
        return types.uint32(types.float32, high), lambda ctx, builder, sig, args: builder.bitcast(
            args[0], ir.IntType(32)
        )

    def join(ctx, builder, sig, args):
        low, high = (builder.zext(half, ir.IntType(32)) for half in args)
        return builder.or_(low, builder.shl(high, ir.Constant(ir.IntType(32), 16)))

    return types.uint32(types.uint16, types.uint16), join


@intrinsic
def add_product(context, left, first_word, words, right, sums, first_column, like):
    """Add the product of two tiles to `sums[:, first_column:first_column + TILE_COLUMNS]`.

    left (TILE_ROWS, n) uint32, read in `words` columns from `first_word` on; right (words, TILE_COLUMNS or
    more) uint32; sums (TILE_ROWS, m) float32. All are contiguous, but the rows of `right` may be apart. Words hold
    elements of the type of `like`, as `word` makes them. Nothing is checked.

    This is the inner kernel of a matrix product (as in BLIS or oneDNN): for each word of the inner dimension it loads
    one row of the right tile and multiplies it by each of the TILE_ROWS words on the left, spread over all lanes. All
    sums stay in registers from the first word to the last, and each load from the right is used TILE_ROWS times. Loops
    in numba's own language would leave it to LLVM whether the sums are loaded and stored for every word.
    """

    def build(ctx, builder, sig, args):
        of_words, of_sums = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)
        left, right, sums = (ctx.make_array(sig.args[place])(ctx, builder, args[place]) for place in (0, 3, 4))
        lefts = [_element(builder, left, row, args[1]) for row in range(TILE_ROWS)]
        targets = [
            [
                builder.bitcast(
                    builder.gep(_element(builder, sums, row, args[5]), [ir.Constant(ir.IntType(64), column)]),
                    of_sums.as_pointer(),
                )
                for column in range(0, TILE_COLUMNS, LANES)
            ]
            for row in range(TILE_ROWS)
        ]
        totals = [[cgutils.alloca_once(builder, of_sums) for _ in row] for row in targets]
        for row, target in zip(totals, targets, strict=True):
            for total, place in zip(row, target, strict=True):
                builder.store(builder.load(place, align=4), total)
        stride = builder.extract_value(right.strides, 0)
        base = builder.ptrtoint(right.data, ir.IntType(64))
        with cgutils.for_range(builder, args[2]) as loop:
            line = builder.inttoptr(builder.add(base, builder.mul(loop.index, stride)), of_words.as_pointer())
            vectors = [
                builder.load(builder.gep(line, [ir.Constant(ir.IntType(64), part)]), align=4)
                for part in range(TILE_COLUMNS // LANES)
            ]
            for row, pointer in zip(totals, lefts, strict=True):
                one = builder.load(builder.gep(pointer, [loop.index]))
                factor = spread(builder, one, of_words)
                for total, vector in zip(row, vectors, strict=True):
                    builder.store(multiply_add(builder, factor, vector, builder.load(total), like), total)
        for row, target in zip(totals, targets, strict=True):
            for total, place in zip(row, target, strict=True):
                builder.store(builder.load(total), place, align=4)
        return ctx.get_dummy_value()

    return types.void(left, types.intp, types.intp, right, sums, types.intp, like), build


def prefetch_line(builder, address):
    """Write the instruction that asks for the cache line of an address, into all caches."""
    number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    for_reading, all_caches, data = number(0), number(3), number(1)
    builder.call(function, [builder.inttoptr(address, pointer), for_reading, all_caches, data])


def _element(builder, array, row, column):
    """Return a pointer to an element of a contiguous array of two dimensions."""
    width = builder.extract_value(array.shape, 1)
    return builder.gep(array.data, [builder.add(builder.mul(ir.Constant(ir.IntType(64), row), width), column)])


def spread(builder, one, vector):
    """Return a vector with a number in every lane."""
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), one, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), lanes)


def multiply_add(builder, left, right, total, like):
    """Return `total + left * right` lane by lane; of bfloat16, the products of both elements are added."""
    of_sums = total.type
    if like == types.float32:
        pairs = [(left, right)]
    elif _MULTIPLIES_BFLOAT16:
        halves = ir.VectorType(BFloat16(), 2 * LANES)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(of_sums, (of_sums, halves, halves)),
            "llvm.x86.avx512bf16.dpbf16ps.512",
        )
        return builder.call(function, (total, builder.bitcast(left, halves), builder.bitcast(right, halves)))
    else:
        sixteen = ir.Constant(left.type, [16] * LANES)
        upper = ir.Constant(left.type, [0xFFFF0000] * LANES)
        pairs = [
            (builder.shl(left, sixteen), builder.shl(right, sixteen)),
            (builder.and_(left, upper), builder.and_(right, upper)),
        ]
    for one, other in pairs:
        product = builder.fmul(builder.bitcast(one, of_sums), builder.bitcast(other, of_sums), flags=("fast",))
        total = builder.fadd(product, total, flags=("fast",))
    return total


class BFloat16(ir.Type):
    """LLVM's type bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)
