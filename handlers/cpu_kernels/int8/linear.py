"""The product of a linear layer whose weights have few bits and whose activations take 8 bits."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import numpy as np

from handlers.cpu_kernels.blocks import linear
from handlers.cpu_kernels.blocks.layout import EXACT_ROWS, FIRST_PANEL, INPUTS, OUTPUTS, PANEL_WORDS
from handlers.cpu_kernels.blocks.products import address_of
from handlers.cpu_kernels.compilation.decorators import kernel, kernel_part
from handlers.cpu_kernels.inlined import fill
from handlers.cpu_kernels.int8.products import (
    LAID_BYTES,
    ROWS,
    begin_of,
    lay,
    multiply_laid,
    multiply_stored,
)
from handlers.cpu_kernels.int8.quantising import QUANTISED_BYTES, quantise
from handlers.cpu_kernels.intrinsics import empty
from handlers.cpu_kernels.linear import write_sums
from handlers.cpu_kernels.threads.parallel import in_threads, shares_of

_MAX_ROWS = 64  # whose sums are kept in the L1 cache
_SECTION = 12  # blocks, at most, that all rows are multiplied by before the next ones: they stay in the L1 cache
_LINE = 64  # bytes of the caches
_FEW_ROWS = 4  # are quantised by one thread: it takes no longer than to share them out
_ROWS, _NONE = np.int64(ROWS), np.int64(0)

_multiply, _multiply_floats = linear.multiply, linear.multiply_floats


@kernel()
def block_linear_int8(rows, weight, bias, out, threads):
    """Compute `block_linear` with activations that are rounded to 8 bits, for elements of bfloat16.

    weight (1, n) int64: two dimensions tell it from one whose activations are not rounded. Up to weight[0, EXACT_ROWS]
    rows are; for more rows weights are unpacked to what `block_linear` multiplies, and activations stay as they are.
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
    inputs = empty((len(rows), rows.shape[1] // INPUTS, QUANTISED_BYTES), np.uint8)
    if len(rows) <= _FEW_ROWS:
        _quantise(_NONE, len(rows), rows, inputs)
    else:
        in_threads(_quantise, len(rows), (rows, inputs))
    in_threads(_multiply_panels, shares, (inputs, weight, bias, out, shares))


@kernel_part()
def _quantise(first_row, last_row, rows, inputs):
    blocks, block_bytes = inputs.shape[1], INPUTS * rows.itemsize
    for block in range(first_row * blocks, last_row * blocks):
        source = address_of(rows) + np.uintp(block_bytes * block)
        quantise(source, address_of(inputs) + np.uintp(QUANTISED_BYTES * block), rows.dtype.type(0))


@kernel_part()
def _multiply_panels(first_share, last_share, inputs, weight, bias, out, shares):
    """Compute the panels of some shares.

    Of shares that differ by a panel, two threads take as many panels each: the first share is a larger one.
    """
    count, blocks, panels = len(inputs), inputs.shape[1], -(-out.shape[1] // OUTPUTS)
    sums = empty((min(count, _MAX_ROWS), OUTPUTS), np.float32)
    laid = empty(_SECTION * LAID_BYTES, np.uint8)
    for first in range(0, count, _MAX_ROWS):
        last = min(first + _MAX_ROWS, count)
        for panel in range(-(-panels * first_share // shares), -(-panels * last_share // shares)):
            place = FIRST_PANEL + PANEL_WORDS * panel
            code, source = weight[place], address_of(weight) + np.uintp(weight[place + 1])
            fill(sums, np.float32(0))
            if last - first == 1:
                multiply_stored(code, source, blocks, address_of(inputs[first]), address_of(sums))
            else:
                _multiply_rows(code, source, inputs[first:last], laid, sums)
            write_sums(sums, bias, out, first, last, panel * OUTPUTS)


@kernel_part()
def _multiply_rows(code, source, inputs, laid, sums):
    """Add the products of several rows and a panel at an address, in sections of about the same size."""
    count, blocks, stride = len(inputs), inputs.shape[1], QUANTISED_BYTES * inputs.shape[1]
    section = -(-blocks // -(-blocks // _SECTION))
    for block in range(0, blocks, section):
        here = min(section, blocks - block)
        ahead = begin_of(code, source, block + here)
        size = np.int64(ahead - begin_of(code, source, block))
        lines = -(-size // (_LINE * here * -(-count // _ROWS)))
        lay(code, source, block, here, address_of(laid))
        for row in range(0, count, _ROWS):
            multiply_laid(
                code,
                address_of(laid),
                here,
                address_of(inputs[row]) + np.uintp(QUANTISED_BYTES * block),
                stride,
                min(_ROWS, count - row),
                address_of(sums[row]),
                ahead,
                lines,
            )
            ahead += np.uintp(_LINE * here * lines)
