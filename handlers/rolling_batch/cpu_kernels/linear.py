"""The product of a linear layer of bfloat16."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import numpy as np
from numba import prange

from handlers.rolling_batch.cpu_kernels.compilation import kernel
from handlers.rolling_batch.cpu_kernels.intrinsics import TILE_COLUMNS, TILE_ROWS, add_product, load, store

# A panel of weights is multiplied in sections of _MOST_WORDS words (128 KiB with AVX-512), which stay in the L2 cache
# while up to _MOST_TILES tiles of rows use them. The sums of these tiles are kept from section to section.
_MOST_WORDS = 512
_MOST_TILES = 64


@kernel(parallel=True)
def linear(rows, weight, bias, out, threads):
    """`rows @ weight.T + bias` -> out (n, out_features), for elements of bfloat16.

    rows (n, in_features), contiguous; weight (panels, in_features / 2, TILE_COLUMNS) uint32, of which a word holds the
    weights of two inputs in one output; bias (out_features or 0,). threads: how many share the work.

    Each thread has panels of its own: it reads its part of the weights once, and writes columns of its own. The sums of
    a row are added up in the same order whatever the other rows are: a request gets the same bits in any batch. The
    last rows, fewer than a tile, are padded with zeros.
    """
    count, width = out.shape
    panels, words, _ = weight.shape
    whole, tiles, like = count // TILE_ROWS, -(-count // TILE_ROWS), rows.dtype.type(0)
    row_words = rows.view(np.uint32)
    rest = np.zeros((TILE_ROWS, words), np.uint32)
    for row in range(whole * TILE_ROWS, count):
        rest[row - whole * TILE_ROWS] = row_words[row]
    for thread in prange(threads):
        sums = np.empty((_MOST_TILES * TILE_ROWS, TILE_COLUMNS), np.float32)
        for panel in range(panels * thread // threads, panels * (thread + 1) // threads):
            column = panel * TILE_COLUMNS
            columns = min(TILE_COLUMNS, width - column)
            for begin in range(0, tiles, _MOST_TILES):
                end = min(begin + _MOST_TILES, tiles)
                sums[: (end - begin) * TILE_ROWS] = 0
                for first in range(0, words, _MOST_WORDS):
                    most, right = min(_MOST_WORDS, words - first), weight[panel, first:]
                    for tile in range(begin, end):
                        left = row_words[tile * TILE_ROWS : (tile + 1) * TILE_ROWS] if tile < whole else rest
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
