"""The product of a linear layer whose weights have few bits, as layout.py describes them."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import numpy as np

from handlers.cpu_kernels import amx
from handlers.cpu_kernels.blocks import integers, words
from handlers.cpu_kernels.blocks.laid import groups_of
from handlers.cpu_kernels.blocks.layout import EXACT_ROWS, FIRST_PANEL, INPUTS, OUTPUTS, PANEL_WORDS, SECTION
from handlers.cpu_kernels.blocks.products import address_of, multiply_row
from handlers.cpu_kernels.blocks.unpacking import (
    FEWER_ROWS,
    ROWS,
    multiply_fewer,
    multiply_unpacked,
    unpack,
    unpack_and_multiply,
)
from handlers.cpu_kernels.compilation.decorators import kernel, kernel_part
from handlers.cpu_kernels.inlined import fill
from handlers.cpu_kernels.intrinsics import (
    TILE_COLUMNS,
    TILE_ROWS,
    add_product,
    empty,
    host_has,
    load,
    reshaped,
    words_of,
    zeros,
)
from handlers.cpu_kernels.linear import write_sums
from handlers.cpu_kernels.threads.parallel import in_threads, shares_of

# Rows whose sums are kept while panels are unpacked: those of a panel and its rows stay in the L2 cache.
_MAX_ROWS = 512
_MAX_EXACT_ROWS = 64  # whose sums are kept in the L1 cache
_FEW_ROWS = 4  # are prepared by one thread: it takes no longer than to share them out
_COLUMNS = max(TILE_COLUMNS, OUTPUTS)  # of the panels that vector registers multiply at once
_PANELS = _COLUMNS // OUTPUTS
_LINE = 4 * OUTPUTS
_BLOCK_WORDS = INPUTS // 2  # of bfloat16
_LAID = 12  # blocks of bfloat16: 24 KiB, which stay in the L1 cache
# A plain number has a type of its own: parts that are called with one would be compiled once more.
_NONE, _ONE = np.int64(0), np.int64(1)
_TILE_ROWS, _ROWS = np.int64(TILE_ROWS), np.int64(ROWS)
_OF_GROUP, _WORDS_BYTES = np.int64(words.ROWS), np.int64(integers.WORDS_BYTES)


@kernel()
def block_linear(rows, weight, bias, out, threads):
    """`rows @ weight.T + bias` -> out (n, out_features), for elements of bfloat16.

    rows (n, in_features), contiguous, of whole blocks; weight int64, as layout.py describes it; bias (out_features or
    0,). threads: how many share the work.

    Up to weight[EXACT_ROWS] rows weights are not rounded, and a row gets the same bits whatever the others are. For
    more rows weights are unpacked: to bfloat16 if the processor multiplies it, else to float32.
    """
    if len(rows) <= weight[EXACT_ROWS]:
        _multiply_integers(rows, weight, bias, out, threads)
    else:
        multiply(rows, weight, bias, out, threads)


@kernel()
def block_linear_in_vectors(rows, weight, bias, out, threads):
    """Compute `block_linear` for elements of float32, to which weights are unpacked."""
    if len(rows) <= weight[EXACT_ROWS]:
        _multiply_row_by_row(_inputs(rows), weight, bias, out, threads)
    else:
        multiply_floats(rows, weight, bias, out, threads)


@kernel_part()
def _floats(rows):
    """Return rows of float32."""
    floats = empty(rows.shape, np.float32)
    for n in range(len(rows)):
        row, target = rows[n], floats[n]
        for place in range(len(row)):
            target[place] = load(row[place])
    return floats


@kernel_part()
def _inputs(rows):
    """Return rows as `multiply_row` takes them: (n, blocks, elements of a block)."""
    floats = _floats(rows)
    return reshaped(floats, (len(rows), rows.shape[1] // INPUTS, INPUTS))


@kernel_part()
def _prepared(rows):
    """Do what `_inputs` does, for contiguous rows of bfloat16 where integers are multiplied."""
    blocks = rows.shape[1] // INPUTS
    found = empty((len(rows), blocks, integers.PREPARED_BYTES), np.uint8)
    for block in range(len(rows) * blocks):
        source = address_of(rows) + np.uintp(2 * INPUTS * block)
        integers.prepare(source, address_of(found) + np.uintp(integers.PREPARED_BYTES * block))
    return found


@kernel_part()
def _multiply_row_by_row(inputs, weight, bias, out, threads):
    """Multiply rows as `multiply_row` takes them."""
    shares = shares_of(threads)
    in_threads(_row_by_row, shares, (inputs, weight, bias, out, shares))


@kernel_part()
def _row_by_row(first_share, last_share, inputs, weight, bias, out, shares):
    """Compute the panels of some shares."""
    panels = -(-out.shape[1] // OUTPUTS)
    sums = empty((1, OUTPUTS), np.float32)
    for panel in range(panels * first_share // shares, panels * last_share // shares):
        for row in range(len(inputs)):
            _multiply_row(weight, panel, inputs, row, sums, out.dtype.type(0))
            write_sums(sums, bias, out, row, row + 1, panel * OUTPUTS)


@kernel_part(is_separate=True)
def _multiply_row(weight, panel, inputs, row, sums, like):
    place = FIRST_PANEL + PANEL_WORDS * panel
    source = address_of(weight) + np.uintp(weight[place + 1])
    multiply_row(weight[place], source, inputs.shape[1], address_of(inputs[row]), address_of(sums), like)


# --- several rows in integers ---


@kernel_part()
def _multiply_prepared(rows, weight, bias, out, threads):
    _multiply_row_by_row(_prepared(rows), weight, bias, out, threads)


@kernel_part()
def _multiply_together(rows, weight, bias, out, threads):
    """Multiply rows of bfloat16: one by one, or several in words if the kind of a panel allows it."""
    if len(rows) == 1:
        _multiply_prepared(rows, weight, bias, out, threads)
        return
    panels, others = -(-out.shape[1] // OUTPUTS), 0
    for panel in range(panels):
        others += not _is_in_words(weight, panel)
    shares = shares_of(threads)
    inputs = groups_of(rows, _OF_GROUP, _WORDS_BYTES)
    if len(rows) <= _FEW_ROWS:
        _prepare_words(_NONE, len(rows), rows, inputs)
    else:
        in_threads(_prepare_words, len(rows), (rows, inputs))
    single = _prepared(rows if others else rows[:0])
    in_threads(_together, shares, (inputs, single, weight, bias, out, shares))


@kernel_part()
def _is_in_words(weight, panel):
    return words.KINDS_IN_WORDS >> weight[FIRST_PANEL + PANEL_WORDS * panel] & 1


@kernel_part()
def _prepare_words(first_row, last_row, rows, inputs):
    for row in range(first_row, last_row):
        of_group, place = inputs[row // _OF_GROUP], row % _OF_GROUP
        for block in range(len(of_group)):
            source = address_of(rows[row]) + np.uintp(2 * INPUTS * block)
            integers.prepare_words(source, address_of(of_group[block, place]))


@kernel_part()
def _together(first_share, last_share, inputs, single, weight, bias, out, shares):
    """Compute the panels of some shares, for inputs as of `_prepare_words`, or `single` as of `_prepared`."""
    count, panels = len(out), -(-out.shape[1] // OUTPUTS)
    sums = empty((min(-(-count // _OF_GROUP) * _OF_GROUP, _MAX_EXACT_ROWS), OUTPUTS), np.float32)
    laid = empty(words.LAID_BYTES, np.uint8)
    for first in range(0, count, _MAX_EXACT_ROWS):
        last = min(first + _MAX_EXACT_ROWS, count)
        for panel in range(panels * first_share // shares, panels * last_share // shares):
            if _is_in_words(weight, panel):
                fill(sums, np.float32(0))
                words.add_products(weight, panel, inputs[first // _OF_GROUP : -(-last // _OF_GROUP)], laid, sums)
            else:
                for row in range(first, last):
                    _multiply_row(weight, panel, single, row, sums[row - first :], out.dtype.type(0))
            write_sums(sums, bias, out, first, last, panel * OUTPUTS)


# --- many rows ---


@kernel_part()
def _last_rows(rows, of_tile):
    """Return the last rows, which are fewer than a tile, padded with zeros."""
    rest = zeros((of_tile, rows.shape[1]), np.uint32)
    whole = len(rows) // of_tile * of_tile
    for row in range(whole, len(rows)):
        for word in range(rows.shape[1]):
            rest[row - whole, word] = rows[row, word]
    return rest


@kernel_part()
def multiply_floats(rows, weight, bias, out, threads):
    words, shares = words_of(_floats(rows)), shares_of(threads)
    in_threads(_in_floats, shares, (words, _last_rows(words, _TILE_ROWS), weight, bias, out, shares))


@kernel_part()
def _in_floats(first_share, last_share, rows, rest, weight, bias, out, shares):
    """Compute some shares of the panels; `rest` has the rows of the last tile, if it is not whole."""
    count, blocks, panels = len(out), rows.shape[1] // INPUTS, -(-out.shape[1] // OUTPUTS)
    whole, groups, like = count // TILE_ROWS * TILE_ROWS, -(-panels // _PANELS), np.float32(0)
    laid = zeros((SECTION * INPUTS, _COLUMNS), np.uint32)
    sums = empty((min(-(-count // TILE_ROWS) * TILE_ROWS, _MAX_ROWS), _COLUMNS), np.float32)
    for first in range(0, count, _MAX_ROWS):
        last = min(first + _MAX_ROWS, count)
        for group in range(groups * first_share // shares, groups * last_share // shares):
            fill(sums, np.float32(0))
            for block in range(0, blocks, SECTION):
                of_section = min(SECTION, blocks - block)
                for place in range(min(_PANELS, panels - group * _PANELS)):
                    target = address_of(laid) + np.uintp(place * _LINE)
                    _unpack(weight, group * _PANELS + place, block, of_section, target, 4 * _COLUMNS, like)
                for begin in range(first, last, TILE_ROWS):
                    left = rows[begin : begin + TILE_ROWS] if begin < whole else rest
                    totals = sums[begin - first : begin - first + TILE_ROWS]
                    for column in range(0, _COLUMNS, TILE_COLUMNS):
                        right = laid[:, column:]
                        add_product(left, block * INPUTS, of_section * INPUTS, right, totals, column, like)
            write_sums(sums, bias, out, first, last, group * _COLUMNS)


@kernel_part()
def _multiply_words(rows, weight, bias, out, threads):
    words, shares = words_of(rows), shares_of(threads)
    in_threads(_in_words, shares, (words, _last_rows(words, _ROWS), weight, bias, out, shares))


@kernel_part()
def _in_words(first_share, last_share, rows, rest, weight, bias, out, shares):
    """Compute the panels of some shares; `rest` has the rows of the last tile, if it is not whole.

    The first rows are multiplied while a panel is unpacked, a section at a time.
    """
    count, blocks, panels = len(out), rows.shape[1] // _BLOCK_WORDS, -(-out.shape[1] // OUTPUTS)
    whole, stride = count // ROWS * ROWS, 4 * rows.shape[1]
    laid = empty((_LAID * _BLOCK_WORDS, OUTPUTS), np.uint32)
    sums = empty((min(-(-count // ROWS) * ROWS, _MAX_ROWS), OUTPUTS), np.float32)
    for first in range(0, count, _MAX_ROWS):
        last = min(first + _MAX_ROWS, count)
        for panel in range(panels * first_share // shares, panels * last_share // shares):
            fill(sums, np.float32(0))
            for block in range(0, blocks, _LAID):
                of_section = min(_LAID, blocks - block)
                for begin in range(first, last, ROWS):
                    inputs = address_of(rows[begin]) if begin < whole else address_of(rest)
                    inputs += np.uintp(4 * _BLOCK_WORDS * block)
                    totals = address_of(sums[begin - first])
                    if begin == first:
                        _unpack_and_multiply(weight, panel, block, of_section, address_of(laid), inputs, stride, totals)
                    elif last - begin > FEWER_ROWS:
                        multiply_unpacked(of_section * _BLOCK_WORDS, address_of(laid), inputs, stride, totals)
                    else:
                        multiply_fewer(of_section * _BLOCK_WORDS, address_of(laid), inputs, stride, totals)
            write_block(sums, bias, out, first, last, panel * OUTPUTS)
    laid[0, 0] = 0  # numba frees an array after its last use, and does not see those by address


@kernel_part(is_separate=True)
def _unpack_and_multiply(weight, panel, first, blocks, target, inputs, stride, sums):
    place = FIRST_PANEL + PANEL_WORDS * panel
    source = address_of(weight) + np.uintp(weight[place + 1])
    unpack_and_multiply(weight[place], source, first, blocks, target, inputs, stride, sums)


@kernel_part()
def _one_block_of_rows(first_share, last_share, rows, weight, bias, out, shares):
    """Compute the panels of some shares, for up to BLOCK_ROWS rows as words.

    Tile registers multiply a block while vector registers unpack the next one, which the L1 cache holds.
    """
    count, panels, blocks = len(out), -(-out.shape[1] // OUTPUTS), rows.shape[1] // amx.STEP_WORDS
    unpacked, sums = empty((2, amx.STEP_WORDS, OUTPUTS), np.uint32), empty((amx.BLOCK_ROWS, OUTPUTS), np.float32)
    targets, stride = (address_of(unpacked[0]), address_of(unpacked[1])), 4 * rows.shape[1]
    amx.configure_tiles(count)
    for panel in range(panels * first_share // shares, panels * last_share // shares):
        amx.clear_sums(count)
        for block in range(blocks + 1):
            if block < blocks:
                _unpack(weight, panel, block, _ONE, targets[block % 2], _LINE, out.dtype.type(0))
            if block > 0:
                left = address_of(rows) + np.uintp(4 * amx.STEP_WORDS * (block - 1))
                amx.add_step(left, stride, count, targets[(block - 1) % 2])
        amx.store_sums(count, address_of(sums))
        write_block(sums, bias, out, _NONE, count, panel * OUTPUTS)
    amx.release_tiles()
    unpacked[0, 0, 0] = 0  # numba frees an array after its last use, and does not see those by address


@kernel_part()
def _many_blocks_of_rows(first_share, last_share, rows, weight, bias, out, shares):
    """Compute the panels of some shares, for rows as words; an unpacked panel stays in the L2 cache."""
    count, panels, blocks = len(out), -(-out.shape[1] // OUTPUTS), rows.shape[1] // amx.STEP_WORDS
    laid = empty((rows.shape[1], OUTPUTS), np.uint32)
    sums = empty((-(-min(count, _MAX_ROWS) // amx.BLOCK_ROWS), amx.BLOCK_ROWS, OUTPUTS), np.float32)
    configured = 0
    for first in range(0, count, _MAX_ROWS):
        last = min(first + _MAX_ROWS, count)
        for panel in range(panels * first_share // shares, panels * last_share // shares):
            _unpack(weight, panel, _NONE, blocks, address_of(laid), _LINE, out.dtype.type(0))
            for begin in range(first, last, amx.BLOCK_ROWS):
                of_rows = min(amx.BLOCK_ROWS, last - begin)
                if of_rows != configured:
                    amx.configure_tiles(of_rows)
                    configured = of_rows
                amx.multiply_block(rows, begin, of_rows, laid, sums[(begin - first) // amx.BLOCK_ROWS], False)
            for begin in range(first, last, amx.BLOCK_ROWS):
                end = min(begin + amx.BLOCK_ROWS, last)
                write_block(sums[(begin - first) // amx.BLOCK_ROWS], bias, out, begin, end, panel * OUTPUTS)
    amx.release_tiles()


@kernel_part()
def write_block(sums, bias, out, begin, end, column):
    if len(bias) == 0 and column + OUTPUTS <= out.shape[1]:
        amx.write_block(sums, end - begin, out, begin, column)
    else:
        write_sums(sums, bias, out, begin, end, column)


@kernel_part(is_separate=True)
def _unpack(weight, panel, first, blocks, target, line, like):
    place = FIRST_PANEL + PANEL_WORDS * panel
    source = address_of(weight) + np.uintp(weight[place + 1])
    unpack(weight[place], source, first, blocks, target, line, like)


@kernel_part()
def _multiply_in_tile_registers(rows, weight, bias, out, threads):
    shares = shares_of(threads)
    arguments = words_of(rows), weight, bias, out, shares
    if len(rows) <= amx.BLOCK_ROWS:
        in_threads(_one_block_of_rows, shares, arguments)
    else:
        in_threads(_many_blocks_of_rows, shares, arguments)


@kernel_part()
def _multiply_as_floats(rows, weight, bias, out, threads):
    _multiply_row_by_row(_inputs(rows), weight, bias, out, threads)


_multiply_integers = _multiply_as_floats
if words.IS_USABLE:
    _multiply_integers = _multiply_together
elif integers.IS_USABLE:
    _multiply_integers = _multiply_prepared
multiply = multiply_floats
if amx.IS_USABLE:
    multiply = _multiply_in_tile_registers
elif host_has("avx512bf16"):
    multiply = _multiply_words
