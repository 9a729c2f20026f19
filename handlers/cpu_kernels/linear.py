"""The product of a linear layer of bfloat16: in vector registers, or in the tile registers of AMX."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import numpy as np

from handlers.cpu_kernels import amx
from handlers.cpu_kernels.compilation.decorators import kernel, kernel_part
from handlers.cpu_kernels.intrinsics import TILE_COLUMNS, TILE_ROWS, add_product, empty, load, store, words_of, zeros
from handlers.cpu_kernels.threads.parallel import in_threads, shares_of

PANEL_COLUMNS = amx.PANEL_COLUMNS if amx.IS_USABLE else TILE_COLUMNS
"""How many outputs a panel of weights has."""
PANEL_WORDS = amx.STEP_WORDS if amx.IS_USABLE else 1
"""The number of words of a panel is a multiple of this: zeros fill it up."""

# In vector registers a panel is multiplied in sections of _MAX_WORDS words (128 KiB with AVX-512), which stay in the
# L2 cache while up to _MAX_TILES tiles of rows use them. The sums of these tiles are kept from section to section.
_MAX_WORDS = 512
_MAX_TILES = 64
# In tile registers all panels multiply rows of so many bytes before the next ones: they stay in the L2 cache.
NEAR_BYTES = 2**20


@kernel()
def linear(rows, weight, bias, out, threads):
    """`rows @ weight.T + bias` -> out (n, out_features), for elements of bfloat16.

    rows (n, in_features), contiguous; weight (panels, words, PANEL_COLUMNS) uint32, where a word holds the weights
    of two inputs in one output; bias (out_features or 0,). threads: how many share the work.

    Each share of the work has panels of its own: their weights are read once, and their columns written. The sums of a
    row are added up in the same order whatever the other rows are: a request gets the same bits in any batch.
    """
    _multiply(words_of(rows), weight, bias, out, threads)


@kernel_part()
def _multiply_in_vectors(rows, weight, bias, out, threads):
    """Compute `linear` for rows as words. The last rows, fewer than a tile, are padded with zeros."""
    count, words = rows.shape
    whole = count // TILE_ROWS * TILE_ROWS
    rest = zeros((TILE_ROWS, words), np.uint32)
    for row in range(whole, count):
        for word in range(words):
            rest[row - whole, word] = rows[row, word]
    shares = shares_of(threads)
    in_threads(_in_vectors, shares, (rows, rest, weight, bias, out, shares))


@kernel_part()
def _in_vectors(first_share, last_share, rows, rest, weight, bias, out, shares):
    """Compute the panels of some shares, for rows as words; `rest` has those of the last tile, if it is not whole."""
    count = len(out)
    panels, words, _ = weight.shape
    whole, tiles, like = count // TILE_ROWS, -(-count // TILE_ROWS), out.dtype.type(0)
    sums = empty((_MAX_TILES * TILE_ROWS, TILE_COLUMNS), np.float32)
    for panel in range(panels * first_share // shares, panels * last_share // shares):
        for begin in range(0, tiles, _MAX_TILES):
            end = min(begin + _MAX_TILES, tiles)
            for row in range((end - begin) * TILE_ROWS):
                for c in range(TILE_COLUMNS):
                    sums[row, c] = 0
            for first in range(0, words, _MAX_WORDS):
                most, right = min(_MAX_WORDS, words - first), weight[panel, first:]
                for tile in range(begin, end):
                    left = rows[tile * TILE_ROWS : (tile + 1) * TILE_ROWS] if tile < whole else rest
                    totals = sums[(tile - begin) * TILE_ROWS : (tile - begin + 1) * TILE_ROWS]
                    add_product(left, first, most, right, totals, 0, like)
            write_sums(sums, bias, out, begin * TILE_ROWS, min(end * TILE_ROWS, count), panel * TILE_COLUMNS)


@kernel_part(is_separate=True)
def write_sums(sums, bias, out, begin, end, column):
    """Write a panel's sums of rows `begin:end` as elements from `column` on, with the bias added if there is one."""
    columns, like = min(sums.shape[1], out.shape[1] - column), out.dtype.type(0)
    for row in range(begin, end):
        total, target = sums[row - begin], out[row, column : column + columns]
        if len(bias):
            added = bias[column : column + columns]
            for c in range(columns):
                target[c] = store(total[c] + load(added[c]), like)
        else:
            for c in range(columns):
                target[c] = store(total[c], like)


@kernel_part()
def _multiply_in_tile_registers(rows, weight, bias, out, threads):
    """Compute `linear` for rows as words, which are padded with zeros if the panels have more words."""
    count, words = rows.shape
    shares = shares_of(threads)
    if words == weight.shape[1]:
        in_threads(_in_tile_registers, shares, (rows, weight, bias, out, shares))
        return
    padded = zeros((count, weight.shape[1]), np.uint32)
    for row in range(count):
        for word in range(words):
            padded[row, word] = rows[row, word]
    in_threads(_in_tile_registers, shares, (padded, weight, bias, out, shares))


@kernel_part()
def _in_tile_registers(first_share, last_share, rows, weight, bias, out, shares):
    """Compute the panels of some shares, for rows as words."""
    count, panels = len(rows), len(weight)
    most = max(NEAR_BYTES // (4 * rows.shape[1]) // amx.BLOCK_ROWS, 1) * amx.BLOCK_ROWS
    sums = empty((-(-min(count, most) // amx.BLOCK_ROWS), amx.BLOCK_ROWS, amx.PANEL_COLUMNS), np.float32)
    configured = 0
    for first in range(0, count, most):
        last = min(first + most, count)
        for panel in range(panels * first_share // shares, panels * last_share // shares):
            for begin in range(first, last, amx.BLOCK_ROWS):
                of_block = min(amx.BLOCK_ROWS, last - begin)
                if of_block != configured:
                    amx.configure_tiles(of_block)
                    configured = of_block
                block = sums[(begin - first) // amx.BLOCK_ROWS]
                amx.multiply_block(rows, begin, of_block, weight[panel], block, begin == first)
            # After all blocks, because a thread that reads sums at once would wait for the tile registers to be stored.
            column = panel * amx.PANEL_COLUMNS
            for begin in range(first, last, amx.BLOCK_ROWS):
                block, end = sums[(begin - first) // amx.BLOCK_ROWS], min(begin + amx.BLOCK_ROWS, last)
                if len(bias) == 0 and column + amx.PANEL_COLUMNS <= out.shape[1]:
                    amx.write_block(block, end - begin, out, begin, column)
                else:
                    write_sums(block, bias, out, begin, end, column)
    amx.release_tiles()


_multiply = _multiply_in_tile_registers if amx.IS_USABLE else _multiply_in_vectors
