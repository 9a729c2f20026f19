"""The product of a linear layer whose weights have few bits and whose activations take 8 bits."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import numpy as np

from handlers.cpu_kernels import amx
from handlers.cpu_kernels.blocks import linear
from handlers.cpu_kernels.blocks.laid import groups_of
from handlers.cpu_kernels.blocks.layout import EXACT_ROWS, FIRST_PANEL, INPUTS, OUTPUTS, PANEL_WORDS
from handlers.cpu_kernels.blocks.products import address_of
from handlers.cpu_kernels.compilation.decorators import kernel, kernel_part
from handlers.cpu_kernels.inlined import fill
from handlers.cpu_kernels.int8.products import LAID_BYTES, ROWS, add_products, multiply_stored
from handlers.cpu_kernels.int8.quantising import QUANTISED_BYTES, quantise
from handlers.cpu_kernels.int8.tiles import above_unpacked
from handlers.cpu_kernels.intrinsics import empty
from handlers.cpu_kernels.linear import write_sums
from handlers.cpu_kernels.threads.parallel import in_threads, shares_of

_MAX_ROWS = 64  # whose sums are kept in the L1 cache
_FEW_ROWS = 4  # are quantised by one thread: it takes no longer than to share them out
_NONE, _ONE = np.int64(0), np.int64(1)
_OF_GROUP, _ROW_BYTES = np.int64(ROWS), np.int64(QUANTISED_BYTES)

_multiply, _multiply_floats = linear.multiply, linear.multiply_floats
if amx.MULTIPLIES_BYTES:
    _multiply = above_unpacked(_multiply, linear.write_block)
    _multiply_floats = above_unpacked(_multiply_floats, write_sums)


@kernel()
def block_linear_int8(rows, weight, bias, out, threads):
    """Compute `block_linear` with activations that are rounded to 8 bits, for elements of bfloat16.

    weight (1, n) int64: two dimensions tell it from one whose activations are not rounded. Up to weight[0, EXACT_ROWS]
    rows are; for more rows weights are unpacked to what `block_linear` multiplies, and activations stay as they are.
    Where tile registers multiply bytes, more than weight[0, UNPACKED_ROWS] rows are rounded with a scale for each row.
    """
    if len(rows) <= weight[0, EXACT_ROWS]:
        _multiply_int8(rows, weight[0], bias, out, threads)
    else:
        _multiply(rows, weight[0], bias, out, threads)


@kernel()
def block_linear_int8_in_vectors(rows, weight, bias, out, threads):
    """Compute `block_linear_int8` for elements of float32."""
    if len(rows) <= weight[0, EXACT_ROWS]:
        _multiply_int8(rows, weight[0], bias, out, threads)
    else:
        _multiply_floats(rows, weight[0], bias, out, threads)


@kernel_part()
def _multiply_int8(rows, weight, bias, out, threads):
    shares = shares_of(threads)
    inputs = groups_of(rows, _ONE if len(rows) == 1 else _OF_GROUP, _ROW_BYTES)
    if len(rows) <= _FEW_ROWS:
        _quantise(_NONE, len(rows), rows, inputs)
    else:
        in_threads(_quantise, len(rows), (rows, inputs))
    in_threads(_multiply_panels, shares, (inputs, weight, bias, out, shares))


@kernel_part()
def _quantise(first_row, last_row, rows, inputs):
    of_group = inputs.shape[2]
    for row in range(first_row, last_row):
        blocks = inputs[row // of_group, :, row % of_group]
        for block in range(len(blocks)):
            source = address_of(rows[row]) + np.uintp(INPUTS * rows.itemsize * block)
            quantise(source, address_of(blocks[block]), rows.dtype.type(0))


@kernel_part()
def _multiply_panels(first_share, last_share, inputs, weight, bias, out, shares):
    """Compute the panels of some shares.

    Of shares that differ by a panel, two threads take as many panels each: the first share is a larger one.
    """
    count, panels = len(out), -(-out.shape[1] // OUTPUTS)
    sums = empty((min(-(-count // _OF_GROUP) * _OF_GROUP, _MAX_ROWS), OUTPUTS), np.float32)
    laid = empty(LAID_BYTES, np.uint8)
    for first in range(0, count, _MAX_ROWS):
        last = min(first + _MAX_ROWS, count)
        for panel in range(-(-panels * first_share // shares), -(-panels * last_share // shares)):
            fill(sums, np.float32(0))
            if count == 1:
                _multiply_row(weight, panel, inputs, sums)
            else:
                add_products(weight, panel, inputs[first // _OF_GROUP : -(-last // _OF_GROUP)], laid, sums)
            write_sums(sums, bias, out, first, last, panel * OUTPUTS)


@kernel_part(is_separate=True)
def _multiply_row(weight, panel, inputs, sums):
    """Add the products of a row and a panel."""
    place, given, target = FIRST_PANEL + PANEL_WORDS * panel, address_of(inputs), address_of(sums)
    source = address_of(weight) + np.uintp(weight[place + 1])
    multiply_stored(weight[place], source, _NONE, inputs.shape[1], given, target, target)
