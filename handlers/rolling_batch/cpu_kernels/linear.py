"""The product of a linear layer of bfloat16."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import numpy as np

from handlers.rolling_batch.cpu_kernels.compilation import kernel, kernel_part
from handlers.rolling_batch.cpu_kernels.intrinsics import TILE_COLUMNS, TILE_ROWS, add_product, load, store, words_of
from handlers.rolling_batch.cpu_kernels.parallel import in_threads, shares_of

# A panel of weights is multiplied in sections of _MOST_WORDS words (128 KiB with AVX-512), which stay in the L2 cache
# while up to _MOST_TILES tiles of rows use them. The sums of these tiles are kept from section to section.
_MOST_WORDS = 512
_MOST_TILES = 64


@kernel()
def linear(rows, weight, bias, out, threads):
    """`rows @ weight.T + bias` -> out (n, out_features), for elements of bfloat16.

    rows (n, in_features), contiguous; weight (panels, in_features / 2, TILE_COLUMNS) uint32, of which a word holds the
    weights of two inputs in one output; bias (out_features or 0,). threads: how many share the work.

    Each share of the work has panels of its own: their weights are read once, and their columns written. The sums of a
    row are added up in the same order whatever the other rows are: a request gets the same bits in any batch. The
    last rows, fewer than a tile, are padded with zeros.
    """
    count, words = len(rows), weight.shape[1]
    row_words = words_of(rows)
    whole = count // TILE_ROWS * TILE_ROWS
    rest = np.zeros((TILE_ROWS, words), np.uint32)
    for row in range(whole, count):
        for word in range(words):
            rest[row - whole, word] = row_words[row, word]
    shares = shares_of(threads)
    in_threads(_linear, shares, (row_words, rest, weight, bias, out, shares))


@kernel_part()
def _linear(first_share, last_share, rows, rest, weight, bias, out, shares):
    """Compute the panels of some shares, for rows as words; `rest` has those of the last tile, if it is not whole."""
    count, width = out.shape
    panels, words, _ = weight.shape
    whole, tiles, like = count // TILE_ROWS, -(-count // TILE_ROWS), out.dtype.type(0)
    sums = np.empty((_MOST_TILES * TILE_ROWS, TILE_COLUMNS), np.float32)
    for panel in range(panels * first_share // shares, panels * last_share // shares):
        column = panel * TILE_COLUMNS
        columns = min(TILE_COLUMNS, width - column)
        for begin in range(0, tiles, _MOST_TILES):
            end = min(begin + _MOST_TILES, tiles)
            for row in range((end - begin) * TILE_ROWS):
                for c in range(TILE_COLUMNS):
                    sums[row, c] = 0
            for first in range(0, words, _MOST_WORDS):
                most, right = min(_MOST_WORDS, words - first), weight[panel, first:]
                for tile in range(begin, end):
                    left = rows[tile * TILE_ROWS : (tile + 1) * TILE_ROWS] if tile < whole else rest
                    totals = sums[(tile - begin) * TILE_ROWS : (tile - begin + 1) * TILE_ROWS]
                    add_product(left, first, most, right, totals, 0, like)
            for row in range(begin * TILE_ROWS, min(end * TILE_ROWS, count)):
                total, target = sums[row - begin * TILE_ROWS], out[row, column : column + columns]
                if len(bias):
                    added = bias[column : column + columns]
                    for c in range(columns):
                        target[c] = store(total[c] + load(added[c]), like)
                else:
                    for c in range(columns):
                        target[c] = store(total[c], like)
