"""All-reduce and gather over the ranks of a machine, through memory that they share.

Per rank there are two blocks, which it alone writes, and a counter of the blocks that it has published. There are no
locks. A rank writes a block and then stores its counter with release order; the others load the counter with acquire
order until it is high enough, and then read the block. On x86 both are plain moves: the order only keeps compiler and
processor from moving the block's reads and writes across.

Blocks are numbered, and block n takes the place of block n - 2. No rank still reads that one: the writer of block n
has waited for block n - 1 of all ranks, and a rank publishes its block n - 1 after it has read every block n - 2. So
two blocks per rank suffice, without a barrier.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import numpy as np
from numba import types

from handlers.cpu_kernels.arguments import CACHE_LINE
from handlers.cpu_kernels.compilation.decorators import kernel, kernel_part
from handlers.cpu_kernels.intrinsics import load, load_acquire, store, store_release

_yield_core = types.ExternalFunction("sched_yield", types.int32())


@kernel_part()
def _publish(shared, count):
    """Let the other ranks read what this rank has written so far: its blocks up to number `count`."""
    store_release(shared.counters + np.uintp(shared.rank * CACHE_LINE), count)


@kernel_part()
def _wait_for_all(shared, count):
    """Wait until every rank has published its block number `count`."""
    for other in range(len(shared.blocks)):
        looks = 0
        while load_acquire(shared.counters + np.uintp(other * CACHE_LINE)) < count:
            looks += 1
            if looks % 256 == 0:  # let another process have the core: it may be the rank that this one waits for
                _yield_core()


@kernel_part()
def _published(shared):
    """Return how many blocks this rank has published."""
    return load_acquire(shared.counters + np.uintp(shared.rank * CACHE_LINE))


@kernel(fastmath=True)
def all_reduce(part, out, shared):
    """Sum `part` (n,) of every rank, in the order of the ranks, to `out` (n,). shared: SharedBlocks.

    The order is the same on all ranks, and so are the bits: otherwise the ranks would drift apart, token by token.
    """
    blocks, total, count = shared.blocks, shared.scratch, _published(shared)
    ranks, _, block_size = blocks.shape
    for begin in range(0, len(part), block_size):
        size = min(block_size, len(part) - begin)
        place = count & 1
        own = blocks[shared.rank, place]
        for i in range(size):
            own[i] = part[begin + i]
        count += 1
        _publish(shared, count)
        total[:size] = 0
        _wait_for_all(shared, count)
        for other in range(ranks):
            theirs = blocks[other, place]
            for i in range(size):
                total[i] += load(theirs[i])
        for i in range(size):
            out[begin + i] = store(total[i], out[0])


@kernel()
def gather_columns(part, out, shared):
    """Put the columns of every rank, `part` (n, width), beside each other in `out` (n, ranks * width) of rank 0.

    `out` of the other ranks is left as it is. shared: SharedBlocks, used as in `all_reduce`.
    """
    blocks, rank, count = shared.blocks, shared.rank, _published(shared)
    ranks, _, block_size = blocks.shape
    width = part.shape[1]
    most = min(width, block_size)
    rows = max(1, block_size // width)  # of a block, which holds some rows or some columns of one
    for first in range(0, len(part), rows):
        last = min(first + rows, len(part))
        for begin in range(0, width, most):
            end = min(begin + most, width)
            place, size = count & 1, end - begin
            if rank:
                for row in range(first, last):
                    _copy(part[row, begin:end], blocks[rank, place, (row - first) * size :])
            else:
                for row in range(first, last):
                    _copy(part[row, begin:end], out[row, begin:])
            count += 1
            _publish(shared, count)
            _wait_for_all(shared, count)
            if rank == 0:
                for other in range(1, ranks):
                    for row in range(first, last):
                        theirs = blocks[other, place, (row - first) * size : (row - first + 1) * size]
                        _copy(theirs, out[row, other * width + begin :])


@kernel_part()
def _copy(source, target):
    """Copy an array (n,) to the beginning of `target`. An assignment to a slice takes seconds to compile."""
    for place in range(len(source)):
        target[place] = source[place]
