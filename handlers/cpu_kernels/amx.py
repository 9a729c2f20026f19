"""Products of bfloat16 and of bytes in the tile registers of AMX, which Xeons have since Sapphire Rapids.

A tile register holds 16 rows of 64 bytes. One instruction multiplies 16 rows of 32 elements on the left by 32 elements
of 16 columns on the right, which takes 256 instructions of AVX-512; of bytes it is 64 elements. See "Intrinsics for
Advanced Matrix Extensions" in Intel's Intrinsics Guide, and the chapter on AMX in Intel's optimization manual.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from handlers.cpu_kernels.intrinsics import LANES, BFloat16, host_has, prefetch_line
from lmi_server.machine.tile_registers import ask_for_tile_registers

BLOCK_ROWS, PANEL_COLUMNS, STEP_WORDS = 32, 32, 16
"""How many rows `multiply_block` multiplies at most; how many columns a panel has; the inner dimension's granularity.

STEP_WORDS are the words of two elements, or of four bytes, that one instruction multiplies: the inner dimension is a
multiple of them.
"""

_ROWS, _BYTES, _PANEL_BYTES = 16, 64, 4 * PANEL_COLUMNS  # of a tile register; of the columns of one word of a panel
# Sums are in registers 0 to 3: those of the upper 16 rows by the left and right half of the panel, then the lower ones.
# Both halves of the rows and of the panel follow.
_SUMS, _UPPER, _LOWER, _LEFT, _RIGHT = ((0, 1), (2, 3)), 4, 5, 6, 7
# The panel is asked for this many bytes before it is read. Then memory delivers at its full rate, and without it a
# tenth less (measured on a Xeon with 2 cores; 4 KiB and 16 KiB were no better).
_AHEAD_BYTES = 8192

_INT, _INT8 = ir.IntType(64), ir.IntType(8)
_POINTER, _VOID = _INT8.as_pointer(), ir.VoidType()


IS_USABLE = host_has("amx-bf16") and host_has("avx512bf16") and ask_for_tile_registers()
"""Whether the kernels multiply bfloat16 in tile registers: the processor has them, and the system lets us use them."""
MULTIPLIES_BYTES = IS_USABLE and host_has("amx-int8")
"""Whether they multiply bytes, too."""


@intrinsic
def configure_tiles(context, rows):
    """Let the tile registers hold blocks of `rows` rows, 1 to BLOCK_ROWS. This sets all registers to zero."""

    def build(ctx, builder, sig, args):
        kind = ir.ArrayType(_INT8, 64)
        memory = cgutils.alloca_once(builder, kind)
        builder.store(ir.Constant(kind, None), memory)
        settings = builder.bitcast(memory, _POINTER)

        def put(value, place):
            builder.store(value, builder.gep(settings, [_INT(place)]))

        full = _INT(_ROWS)
        has_lower = builder.icmp_signed(">", args[0], full)
        upper = builder.select(has_lower, full, args[0])
        # Registers that are not used have one row.
        lower = builder.select(has_lower, builder.sub(args[0], full), _INT(1))
        put(_INT8(1), 0)  # palette 1: eight registers
        rows_of = {_UPPER: upper, _LOWER: lower, _LEFT: full, _RIGHT: full}
        rows_of |= {register: count for row, count in zip(_SUMS, (upper, lower), strict=True) for register in row}
        for register, count in rows_of.items():
            put(_INT8(_BYTES), 16 + 2 * register)
            put(builder.trunc(count, _INT8), 48 + register)
        _instruction(builder, "ldtilecfg", settings)
        return ctx.get_dummy_value()

    return types.void(types.intp), build


@intrinsic
def release_tiles(context):
    """Say that this thread does not use the tile registers any more, so that they need not be saved."""

    def build(ctx, builder, sig, args):
        _instruction(builder, "tilerelease")
        return ctx.get_dummy_value()

    return types.void(), build


@intrinsic
def multiply_block(context, rows, first_row, count, panel, sums, is_first):
    """Write the product of a block of rows and a panel to `sums` (BLOCK_ROWS, PANEL_COLUMNS) float32 or int32.

    rows (n, m) uint32: the block is `count` rows from `first_row` on, as many as `configure_tiles` was told, and of
    these the first words; panel (words, PANEL_COLUMNS) uint32, of as many words, a multiple of STEP_WORDS. Both
    are contiguous; rows of `sums` may be apart. Words hold two elements of bfloat16. If sums are integers, words hold
    four bytes, with a sign in rows and without one in the panel. `is_first`: whether the panel comes from memory.
    Nothing is checked.
    """
    product = "tdpbf16ps" if sums.dtype == types.float32 else "tdpbsud"

    def build(ctx, builder, sig, args):
        rows, panel, sums = (ctx.make_array(sig.args[place])(ctx, builder, args[place]) for place in (0, 3, 4))
        stride = builder.mul(builder.extract_value(rows.shape, 1), _INT(4))
        upper = builder.add(builder.ptrtoint(rows.data, _INT), builder.mul(args[1], stride))
        steps = builder.sdiv(builder.extract_value(panel.shape, 0), _INT(STEP_WORDS))
        left = (upper, stride)
        right = (builder.ptrtoint(panel.data, _INT), steps, args[5])
        out = (builder.ptrtoint(sums.data, _INT), builder.extract_value(sums.strides, 0))
        _for_halves(builder, args[2], lambda halves: _multiply(builder, halves, left, right, out, product))
        return ctx.get_dummy_value()

    return types.void(rows, types.intp, types.intp, panel, sums, types.boolean), build


@intrinsic
def clear_sums(context, count):
    """Set the sums of a block of `count` rows in the tile registers to zero, before `add_step`."""

    def build(ctx, builder, sig, args):
        _for_halves(builder, args[0], lambda halves: _clear(builder, halves))
        return ctx.get_dummy_value()

    return types.void(types.intp), build


@intrinsic
def add_step(context, rows, stride, count, panel):
    """Add the product of a block of `count` rows and STEP_WORDS words of a panel to the sums in the tile registers.

    rows: the address of the first word, `stride` bytes before that of the next row; panel: of the words of
    PANEL_COLUMNS columns, which caches hold. Nothing is checked.
    """

    def build(ctx, builder, sig, args):
        rows, stride, count, panel = args
        _for_halves(builder, count, lambda halves: _add_step(builder, halves, (rows, stride), panel, "tdpbf16ps"))
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.intp, types.intp, types.uintp), build


@intrinsic
def store_sums(context, count, sums):
    """Write the sums of a block of `count` rows to an address, for PANEL_COLUMNS float32 of each row."""

    def build(ctx, builder, sig, args):
        _for_halves(builder, args[0], lambda halves: _store(builder, halves, args[1], _INT(_PANEL_BYTES)))
        return ctx.get_dummy_value()

    return types.void(types.intp, types.uintp), build


def _for_halves(builder, count, build):
    """Write `build(1)`, which runs for up to 16 rows, and `build(2)` for more."""
    with builder.if_else(builder.icmp_signed("<=", count, _INT(_ROWS))) as (short, long):
        with short:
            build(1)
        with long:
            build(2)


@intrinsic
def write_block(context, sums, count, out, first_row, column):
    """Write the first `count` rows of `sums` (BLOCK_ROWS, PANEL_COLUMNS) float32 as bfloat16: rounded to even.

    out (n, m) uint16, contiguous: they go to its rows from `first_row` on, and PANEL_COLUMNS columns from `column` on.
    Nothing is checked.
    """

    def build(ctx, builder, sig, args):
        sums, out = (ctx.make_array(sig.args[place])(ctx, builder, args[place]) for place in (0, 2))
        source = builder.ptrtoint(sums.data, _INT)
        width = builder.mul(builder.extract_value(out.shape, 1), _INT(2))
        target = builder.add(
            builder.add(builder.ptrtoint(out.data, _INT), builder.mul(args[4], _INT(2))), builder.mul(args[3], width)
        )
        half, both = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(BFloat16(), PANEL_COLUMNS)
        convert = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(both, (half, half)), "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        )
        with cgutils.for_range(builder, args[1]) as loop:
            line = builder.add(source, builder.mul(loop.index, _INT(4 * PANEL_COLUMNS)))
            low, high = (
                builder.load(builder.inttoptr(builder.add(line, _INT(place)), half.as_pointer()), align=4)
                for place in (0, 4 * LANES)
            )
            place = builder.add(target, builder.mul(loop.index, width))
            rounded = builder.call(convert, (high, low))  # the first operand becomes the upper half
            builder.store(rounded, builder.inttoptr(place, both.as_pointer()), align=2)
        return ctx.get_dummy_value()

    return types.void(sums, types.intp, out, types.intp, types.intp), build


def _multiply(builder, halves, left, right, out, product):
    """Multiply 16 rows, or two `halves` of 16. `left`, `out`: address, bytes from row to row; `right`: of the panel."""
    (rows, stride), (panel, steps, is_first) = left, right
    _clear(builder, halves)
    with cgutils.for_range(builder, steps) as loop:
        across, down = (builder.mul(loop.index, _INT(size)) for size in (_BYTES, STEP_WORDS * _PANEL_BYTES))
        of_panel = builder.add(panel, down)
        with builder.if_then(is_first, likely=True):
            for ahead in range(0, STEP_WORDS * _PANEL_BYTES, _BYTES):
                prefetch_line(builder, builder.add(of_panel, _INT(_AHEAD_BYTES + ahead)))
        _add_step(builder, halves, (builder.add(rows, across), stride), of_panel, product)
    _store(builder, halves, *out)


def _clear(builder, halves):
    for register in (register for row in _SUMS[:halves] for register in row):
        _instruction(builder, "tilezero", register)


def _add_step(builder, halves, left, panel, product):
    rows, stride = left
    for half, register in enumerate((_UPPER, _LOWER)[:halves]):
        _instruction(
            builder, "tileloadd64", register, builder.add(rows, builder.mul(stride, _INT(half * _ROWS))), stride
        )
    for place, column in enumerate((_LEFT, _RIGHT)):
        _instruction(builder, "tileloadd64", column, builder.add(panel, _INT(place * _BYTES)), _INT(_PANEL_BYTES))
        for half, register in enumerate((_UPPER, _LOWER)[:halves]):
            _instruction(builder, product, _SUMS[half][place], register, column)


def _store(builder, halves, sums, width):
    """Write the sums to an address, whose rows are `width` bytes apart."""
    for half, registers in enumerate(_SUMS[:halves]):
        for place, register in enumerate(registers):
            begin = builder.add(builder.add(sums, builder.mul(width, _INT(half * _ROWS))), _INT(place * _BYTES))
            _instruction(builder, "tilestored64", register, begin, width)


def _instruction(builder, name, *operands):
    """Call LLVM's intrinsic of an instruction: numbers are registers, the first of several others is an address."""
    given = [_INT8(operand) if isinstance(operand, int) else operand for operand in operands]
    places = [place for place, operand in enumerate(operands) if not isinstance(operand, int)]
    if places and given[places[0]].type == _INT:
        given[places[0]] = builder.inttoptr(given[places[0]], _POINTER)
    kind = ir.FunctionType(_VOID, [operand.type for operand in given])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), given)
