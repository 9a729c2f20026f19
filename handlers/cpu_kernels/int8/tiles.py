"""Many rows of activations in 8 bits and weights with one scale for each output, in the tile registers of AMX.

Panels of Q8_TILES are read into tile registers as they are stored: unlike for products of bfloat16, nothing is
unpacked, and one instruction multiplies twice as many inputs. Each row has one scale, so that the sums of all its
products are integers, exact up to MAX_INPUTS, and a row gets the same bits whatever the others are.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

from typing import Any

import numpy as np

from handlers.cpu_kernels import amx
from handlers.cpu_kernels.blocks.layout import FIRST_PANEL, INPUTS, OUTPUTS, PANEL_WORDS, SCALES_BYTES, UNPACKED_ROWS
from handlers.cpu_kernels.blocks.products import address_of
from handlers.cpu_kernels.compilation.decorators import kernel_part
from handlers.cpu_kernels.int8.quantising import quantise_row
from handlers.cpu_kernels.intrinsics import array_at, empty, reshaped, words_of
from handlers.cpu_kernels.linear import NEAR_BYTES
from handlers.cpu_kernels.threads.parallel import in_threads, shares_of

MAX_INPUTS = 2**17
"""For so many inputs, sums of products of two numbers up to 127 fit into 32 bits."""
_WORD_BYTES, _LAID_WORDS = 4, OUTPUTS // 2  # bytes of a word of a row, and the int64 that hold one of each output


def above_unpacked(multiply: Any, write: Any) -> Any:
    """Return a part of kernels that computes up to weight[UNPACKED_ROWS] rows by `multiply`, and more rows by tiles.

    `write(sums, bias, out, begin, end, column)` writes rows of a panel, as `write_sums` does.
    """

    @kernel_part()
    def in_tiles(first_share, last_share, rows, scales, begins, weight, bias, out, shares):
        """Compute the panels of some shares, for rows as `_quantise_rows` writes them."""
        count, words, panels = len(out), rows.shape[1], -(-out.shape[1] // OUTPUTS)
        most = max(NEAR_BYTES // (_WORD_BYTES * words) // amx.BLOCK_ROWS, 1) * amx.BLOCK_ROWS
        sums = empty((-(-min(count, most) // amx.BLOCK_ROWS), amx.BLOCK_ROWS, OUTPUTS), np.int32)
        scaled, like = empty((amx.BLOCK_ROWS, OUTPUTS), np.float32), empty(OUTPUTS, np.float32)
        configured = 0
        for first in range(0, count, most):
            last = min(first + most, count)
            for panel in range(panels * first_share // shares, panels * last_share // shares):
                place = weight[FIRST_PANEL + PANEL_WORDS * panel + 1]
                numbers = _numbers_at(weight, (place + SCALES_BYTES) // 8, words)
                for begin in range(first, last, amx.BLOCK_ROWS):
                    of_block = min(amx.BLOCK_ROWS, last - begin)
                    if of_block != configured:
                        amx.configure_tiles(of_block)
                        configured = of_block
                    block = sums[(begin - first) // amx.BLOCK_ROWS]
                    amx.multiply_block(rows, begin, of_block, numbers, block, begin == first)
                # After all blocks, because a thread that reads sums at once would wait for them to be stored.
                of_outputs = array_at(address_of(weight) + np.uintp(place), like)
                for begin in range(first, last, amx.BLOCK_ROWS):
                    end = min(begin + amx.BLOCK_ROWS, last)
                    block = sums[(begin - first) // amx.BLOCK_ROWS]
                    _scale(block, begins[begin:end], scales[begin:end], of_outputs, scaled)
                    write(scaled, bias, out, begin, end, panel * OUTPUTS)
        amx.release_tiles()

    @kernel_part()
    def multiply_many(rows, weight, bias, out, threads):
        if len(rows) <= weight[UNPACKED_ROWS]:
            multiply(rows, weight, bias, out, threads)
            return
        count, shares = len(rows), shares_of(threads)
        steps = -(-rows.shape[1] // (_WORD_BYTES * amx.STEP_WORDS))
        numbers = empty((count, steps * amx.STEP_WORDS), np.uint32)
        scales, begins = empty(count, np.float32), empty(count, np.int32)
        in_threads(_quantise_rows, count, (rows, numbers, scales, begins))
        in_threads(in_tiles, shares, (numbers, scales, begins, weight, bias, out, shares))

    return multiply_many


@kernel_part()
def _quantise_rows(first_row, last_row, rows, numbers, scales, begins):
    """Write some rows as words of four numbers, with zeros behind the last input; the rest as of `quantise_row`."""
    for row in range(first_row, last_row):
        source, target, of_row = address_of(rows[row]), address_of(numbers[row]), numbers[row]
        scales[row], begins[row] = quantise_row(source, rows.shape[1] // INPUTS, target, rows.dtype.type(0))
        for word in range(rows.shape[1] // _WORD_BYTES, len(of_row)):
            of_row[word] = 0


@kernel_part()
def _numbers_at(weight, place, words):
    """Return so many words of all outputs of a panel, (words, OUTPUTS) uint32, from a place of the weight on."""
    of_panel = weight[place : place + words * _LAID_WORDS]
    return words_of(reshaped(of_panel, (words, np.int64(_LAID_WORDS))))


@kernel_part(is_separate=True)
def _scale(sums, begins, scales, of_outputs, scaled):
    """Write the sums of rows in float32 to `scaled`. begins, scales: of the rows."""
    for row in range(len(scales)):
        begin, scale, of_row, target = begins[row], scales[row], sums[row], scaled[row]
        for column in range(OUTPUTS):
            target[column] = np.float32(np.int32(of_row[column] + begin)) * of_outputs[column] * scale
