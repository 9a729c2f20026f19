"""The product of a linear layer whose weights have few bits, as layout.py describes them."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import numpy as np

from handlers.cpu_kernels import amx
from handlers.cpu_kernels.blocks.layout import (
    ALIGNMENT,
    EXACT_ROWS,
    FIRST_PANEL,
    HAS_MINIMA,
    INPUTS,
    OUTPUTS,
    PANEL_WORDS,
    Q4,
    Q4_MIN,
    Q8,
    SECTION,
)
from handlers.cpu_kernels.blocks.products import add_block_products, add_scaled, address_of, subtract_minima
from handlers.cpu_kernels.blocks.row import multiply_row_of_eight, multiply_row_of_four
from handlers.cpu_kernels.blocks.unpacking import scale_words, unpack_eight, unpack_four, widen_halves
from handlers.cpu_kernels.compilation.decorators import kernel, kernel_part
from handlers.cpu_kernels.intrinsics import TILE_ROWS, load, words_of
from handlers.cpu_kernels.linear import write_sums
from handlers.cpu_kernels.threads.parallel import in_threads, shares_of

# Rows whose sums are kept while panels are unpacked: those of a panel and its rows stay in the L2 cache.
_MAX_ROWS = 512
_LINE = 4 * OUTPUTS
_Q8, _Q4, _Q4_MIN = Q8.block_bytes, Q4.block_bytes, Q4_MIN.block_bytes
_OF_Q8, _OF_Q4 = Q8.code, Q4.code
_HALVES = 2 * OUTPUTS  # bytes of the scales of a block
_STEP = 4 * amx.STEP_WORDS  # bytes of the inputs of a block in bfloat16
_APART = SECTION * amx.BLOCK_ROWS * _LINE  # bytes of the products of a section in tile registers
# Bytes of what is unpacked of a section: words, of float32 at most, and scales; and of all scratch memory.
_OF_WORDS, _OF_SCALES = SECTION * INPUTS * _LINE, SECTION * _LINE
_SCRATCH = ALIGNMENT + _OF_WORDS + 2 * _OF_SCALES + _APART


@kernel()
def block_linear(rows, weight, bias, out, threads):
    """`rows @ weight.T + bias` -> out (n, out_features), for elements of bfloat16.

    rows (n, in_features), contiguous, of whole blocks; weight int64, as layout.py describes it; bias (out_features or
    0,). threads: how many share the work.

    Up to weight[EXACT_ROWS] rows weights are not rounded, and a row gets the same bits whatever the others are. For
    more rows tile registers multiply weights that are rounded to bfloat16.
    """
    _multiply(rows, weight, bias, out, threads)


@kernel()
def block_linear_in_vectors(rows, weight, bias, out, threads):
    """Compute `block_linear` in vector registers, also for elements of float32. No weight is rounded."""
    _multiply_in_vectors(rows, weight, bias, out, threads)


@kernel_part()
def _multiply_in_vectors(rows, weight, bias, out, threads):
    """The last rows, fewer than a tile, are padded with zeros."""
    shares, words = shares_of(threads), words_of(rows)
    whole = len(rows) // TILE_ROWS * TILE_ROWS
    rest = np.zeros((TILE_ROWS, words.shape[1]), np.uint32)
    for row in range(whole, len(rows)):
        for word in range(words.shape[1]):
            rest[row - whole, word] = words[row, word]
    in_threads(_in_vectors, shares, (words, rest, weight, _input_sums(rows, weight), bias, out, shares))


@kernel_part()
def _multiply_in_tile_registers(rows, weight, bias, out, threads):
    shares, words = shares_of(threads), words_of(rows)
    if len(rows) == 1 and weight[EXACT_ROWS] > 0:
        row = np.empty(rows.shape[1], np.float32)
        for place in range(len(row)):
            row[place] = load(rows[0, place])
        in_threads(_one_row, shares, (row, weight, _input_sums(rows, weight), bias, out, shares))
    elif len(rows) <= weight[EXACT_ROWS]:
        in_threads(_in_tile_registers, shares, (words, weight, _input_sums(rows, weight), bias, out, shares))
    else:
        in_threads(_rounded_in_tile_registers, shares, (words, weight, bias, out, shares))


@kernel_part(fastmath=True)
def _input_sums(rows, weight):
    """Return the sum of the inputs of each block in each row, by which minima are multiplied; zeros if there are none.

    They are added up in the same order whatever the other rows are.
    """
    blocks = rows.shape[1] // INPUTS if weight[HAS_MINIMA] else 0
    sums = np.empty((len(rows), blocks), np.float32)
    for row in range(len(rows)):
        for block in range(blocks):
            inputs, total = rows[row, block * INPUTS : (block + 1) * INPUTS], np.float32(0)
            for place in range(INPUTS):
                total += load(inputs[place])
            sums[row, block] = total
    return sums


@kernel_part()
def _in_vectors(first_share, last_share, rows, rest, weight, input_sums, bias, out, shares):
    """Compute the panels of some shares, for rows as words; `rest` has those of the last tile, if it is not whole."""
    like = out.dtype.type(0)
    count, stride = len(out), 4 * rows.shape[1]
    panels, blocks = -(-out.shape[1] // OUTPUTS), stride // (INPUTS * out.itemsize)
    across = stride // blocks  # bytes of a block
    most = min(-(-count // TILE_ROWS) * TILE_ROWS, _MAX_ROWS)
    scratch = np.empty(_SCRATCH, np.uint8)
    words, scales, minima, _ = _places(scratch)
    totals = np.empty((most, OUTPUTS), np.float32)
    whole = count // TILE_ROWS * TILE_ROWS
    for first in range(0, count, _MAX_ROWS):
        last = min(first + _MAX_ROWS, count)
        for panel in range(panels * first_share // shares, panels * last_share // shares):
            _clear(totals, most)
            for block in range(0, blocks, SECTION):
                of_section = min(SECTION, blocks - block)
                less = _unpack_section(weight, panel, block, of_section, words, scales, minima, like)
                for begin in range(first, last, TILE_ROWS):
                    left = address_of(rows) + np.uintp(begin * stride) if begin < whole else address_of(rest)
                    target = address_of(totals) + np.uintp((begin - first) * _LINE)
                    left += np.uintp(block * across)
                    add_block_products(left, stride, of_section, words, scales, target, like)
                if less:
                    distance = 4 * input_sums.shape[1]
                    factors = address_of(input_sums) + np.uintp(first * distance + 4 * block)
                    subtract_minima(less, of_section, factors, distance, last - first, address_of(totals))
            write_sums(totals, bias, out, first, last, panel * OUTPUTS)
    scratch[0] = 0  # numba frees an array after its last use, and does not see those by address


@kernel_part()
def _in_tile_registers(first_share, last_share, rows, weight, input_sums, bias, out, shares):
    """Compute the panels of some shares, for rows as words: the products of each block apart, then scaled.

    Tile registers multiply a block while vector registers unpack the next one.
    """
    like = out.dtype.type(0)
    count, stride, distance = len(out), 4 * rows.shape[1], 4 * input_sums.shape[1]
    panels, blocks = -(-out.shape[1] // OUTPUTS), rows.shape[1] // amx.STEP_WORDS
    scratch = np.empty(_SCRATCH, np.uint8)
    words, scales, minima, apart = _places(scratch)
    totals = np.empty((amx.BLOCK_ROWS, OUTPUTS), np.float32)
    configured = 0
    for panel in range(panels * first_share // shares, panels * last_share // shares):
        for begin in range(0, count, amx.BLOCK_ROWS):
            of_rows = min(amx.BLOCK_ROWS, count - begin)
            if of_rows != configured:
                amx.configure_tiles(of_rows)
                configured = of_rows
            _clear(totals, of_rows)
            for block in range(0, blocks, SECTION):
                of_section, less = min(SECTION, blocks - block), np.uintp(0)
                left = address_of(rows) + np.uintp(begin * stride + block * _STEP)
                for place in range(of_section):
                    target, line = words + np.uintp(place * amx.STEP_WORDS * _LINE), np.uintp(place * _LINE)
                    less = _unpack_section(weight, panel, block + place, 1, target, scales + line, minima + line, like)
                    products = apart + np.uintp(place * of_rows * _LINE)
                    amx.multiply_steps(left + np.uintp(place * _STEP), stride, of_rows, 1, target, products)
                add_scaled(apart, of_section, scales, of_rows, address_of(totals))
                if less:
                    factors = address_of(input_sums) + np.uintp(begin * distance + 4 * block)
                    subtract_minima(minima, of_section, factors, distance, of_rows, address_of(totals))
            write_sums(totals, bias, out, begin, begin + of_rows, panel * OUTPUTS)
    amx.release_tiles()
    scratch[0] = 0  # as above


@kernel_part()
def _one_row(first_share, last_share, row, weight, input_sums, bias, out, shares):
    """Compute the panels of some shares for one row of float32, with the bits of `_in_tile_registers`."""
    panels, blocks = -(-out.shape[1] // OUTPUTS), len(row) // INPUTS
    totals, minima = np.empty((1, OUTPUTS), np.float32), np.empty((SECTION, OUTPUTS), np.float32)
    target, less = address_of(totals), address_of(minima)
    for panel in range(panels * first_share // shares, panels * last_share // shares):
        place = FIRST_PANEL + PANEL_WORDS * panel
        kind, begin = weight[place], address_of(weight) + np.uintp(weight[place + 1])
        _clear(totals, 1)
        for block in range(0, blocks, SECTION):
            of_section, inputs = min(SECTION, blocks - block), address_of(row) + np.uintp(4 * INPUTS * block)
            if kind == _OF_Q8:
                multiply_row_of_eight(inputs, begin + np.uintp(block * _Q8), _HALVES, of_section, _Q8, target)
            elif kind == _OF_Q4:
                multiply_row_of_four(inputs, begin + np.uintp(block * _Q4), _HALVES, of_section, _Q4, target, 8)
            else:
                source = begin + np.uintp(block * _Q4_MIN)
                multiply_row_of_four(inputs, source, 2 * _HALVES, of_section, _Q4_MIN, target, 0)
                widen_halves(source + np.uintp(_HALVES), of_section, _Q4_MIN, less)
                factors = address_of(input_sums) + np.uintp(4 * block)
                subtract_minima(less, of_section, factors, 0, 1, target)
        write_sums(totals, bias, out, 0, 1, panel * OUTPUTS)
    minima[0, 0] = 0  # as above


@kernel_part()
def _rounded_in_tile_registers(first_share, last_share, rows, weight, bias, out, shares):
    """Compute the panels of some shares, for rows as words. Weights are rounded to bfloat16, once for many rows."""
    like = out.dtype.type(0)
    count, panels, blocks = len(out), -(-out.shape[1] // OUTPUTS), rows.shape[1] // amx.STEP_WORDS
    most = -(-min(count, _MAX_ROWS) // amx.BLOCK_ROWS)
    scratch = np.empty(_SCRATCH, np.uint8)
    words, scales, minima, _ = _places(scratch)
    laid = np.empty((rows.shape[1], OUTPUTS), np.uint32)
    sums = np.empty((most, amx.BLOCK_ROWS, OUTPUTS), np.float32)
    configured = 0
    for first in range(0, count, _MAX_ROWS):
        last = min(first + _MAX_ROWS, count)
        for panel in range(panels * first_share // shares, panels * last_share // shares):
            for block in range(0, blocks, SECTION):
                of_section = min(SECTION, blocks - block)
                less = _unpack_section(weight, panel, block, of_section, words, scales, minima, like)
                target = address_of(laid) + np.uintp(block * amx.STEP_WORDS * _LINE)
                scale_words(words, of_section, scales, less, target)
            for begin in range(first, last, amx.BLOCK_ROWS):
                of_rows = min(amx.BLOCK_ROWS, last - begin)
                if of_rows != configured:
                    amx.configure_tiles(of_rows)
                    configured = of_rows
                amx.multiply_block(rows, begin, of_rows, laid, sums[(begin - first) // amx.BLOCK_ROWS], False)
            for begin in range(first, last, amx.BLOCK_ROWS):
                of_block, end = sums[(begin - first) // amx.BLOCK_ROWS], min(begin + amx.BLOCK_ROWS, last)
                write_sums(of_block, bias, out, begin, end, panel * OUTPUTS)
    amx.release_tiles()
    scratch[0] = 0  # as above


_multiply = _multiply_in_tile_registers if amx.IS_USABLE else _multiply_in_vectors


@kernel_part()
def _places(scratch):
    """Return addresses in room of _SCRATCH bytes: of the words, scales and minima of a section, and of its products."""
    words = (address_of(scratch) + np.uintp(ALIGNMENT - 1)) & ~np.uintp(ALIGNMENT - 1)
    scales = words + np.uintp(_OF_WORDS)
    minima = scales + np.uintp(_OF_SCALES)
    return words, scales, minima, minima + np.uintp(_OF_SCALES)


@kernel_part()
def _clear(totals, rows):
    for row in range(rows):
        for c in range(OUTPUTS):
            totals[row, c] = 0


@kernel_part()
def _unpack_section(weight, panel, first, blocks, words, scales, minima, like):
    """Unpack blocks `first` to `first + blocks` - 1 of a panel to addresses; return that of the minima, 0 if none."""
    place = FIRST_PANEL + PANEL_WORDS * panel
    return _unpack(
        weight[place], address_of(weight) + np.uintp(weight[place + 1]), first, blocks, words, scales, minima, like
    )


@kernel_part()
def _unpack(kind, panel, first, blocks, words, scales, minima, like):
    """Unpack blocks `first` to `first + blocks` - 1 of the panel at an address: all others are addresses to write to.

    Return the address of the minima, 0 if there are none.
    """
    if kind == _OF_Q8:
        block = panel + np.uintp(first * _Q8)
        widen_halves(block, blocks, _Q8, scales)
        unpack_eight(block + np.uintp(_HALVES), blocks, _Q8, words, like)
        return np.uintp(0)
    if kind == _OF_Q4:
        block = panel + np.uintp(first * _Q4)
        widen_halves(block, blocks, _Q4, scales)
        unpack_four(block + np.uintp(_HALVES), blocks, _Q4, 8, words, like)
        return np.uintp(0)
    block = panel + np.uintp(first * _Q4_MIN)
    widen_halves(block, blocks, _Q4_MIN, scales)
    widen_halves(block + np.uintp(_HALVES), blocks, _Q4_MIN, minima)
    unpack_four(block + np.uintp(2 * _HALVES), blocks, _Q4_MIN, 0, words, like)
    return minima
