"""All-reduce and gather over the ranks of one machine, through a file in /dev/shm that all of them map.

Each rank copies its part to a block of its own, publishes the block's number, and reads the blocks of the others as
they come. The number is stored with release order and loaded with acquire order: who sees it also sees the block. Every
rank adds up in the order of the ranks, so that all get the same bits.

MPI's collectives copy once more, and a waiting rank spins without ever yielding its core, although the front end needs
it on a machine with a core per rank.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import torch

from handlers.cpu_kernels.arguments import CACHE_LINE, SharedBlocks
from handlers.cpu_kernels.arrays import as_numpy
from lmi_server.contract.ranks import Rank

SHARED_TYPES = (torch.float32, torch.bfloat16)
_BLOCK = 64 * 1024  # elements that are shared at a time: they stay in the processor's cache

# What a kernel takes if the model is not split: of the same types as for several ranks, because numba compiles a kernel
# for each combination of types that it meets.
ONE_RANK = SharedBlocks(np.empty((1, 4, 2), np.uint16)[:, ::2], np.uintp(0), 0, np.empty(0, np.float32))


class ShmAllReduce:
    """Sums and gathers over the ranks of a group; all ranks call the same methods with the same shapes in one order."""

    def __init__(self, rank: Rank) -> None:
        from handlers.cpu_kernels.threads import shared_memory as kernels

        self._all_reduce, self._gather_columns = kernels.all_reduce, kernels.gather_columns
        self._rank, self._ranks = rank.rank, rank.size
        counter_bytes, block_bytes = rank.size * CACHE_LINE, rank.size * 2 * _BLOCK * 4
        self._memory = np.frombuffer(_map(Path(rank.directory) / "shared", counter_bytes + block_bytes), np.uint8)
        blocks = self._memory[counter_bytes:]
        private = (np.uintp(self._memory.ctypes.data), rank.rank, np.empty(_BLOCK, np.float32))
        # Blocks of both types lie at the same addresses, those of bfloat16 with gaps between: block n of one type must
        # not overwrite block n - 1 of the other, which a slower rank may still read.
        self._shared = {
            torch.float32: SharedBlocks(blocks.view(np.float32).reshape(rank.size, 2, _BLOCK), *private),
            torch.bfloat16: SharedBlocks(blocks.view(np.uint16).reshape(rank.size, 4, _BLOCK)[:, ::2], *private),
        }

    def shared(self, dtype: torch.dtype) -> SharedBlocks:
        """Return what a kernel takes to share elements of `dtype` itself."""
        return self._shared[dtype]

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of `part`, of one of SHARED_TYPES, over all ranks; the bits are the same on all."""
        part = part.contiguous()
        out = torch.empty_like(part)
        self._all_reduce(as_numpy(part.view(-1)), as_numpy(out.view(-1)), self._shared[part.dtype])
        return out

    def gather_columns(self, columns: torch.Tensor) -> torch.Tensor:
        """(..., width) of each rank, of one of SHARED_TYPES -> on rank 0 (..., ranks * width), elsewhere `columns`."""
        part = columns.reshape(-1, columns.shape[-1]).contiguous()
        out = part.new_empty((part.shape[0], self._ranks * part.shape[1])) if self._rank == 0 else part
        self._gather_columns(as_numpy(part), as_numpy(out), self._shared[part.dtype])
        return columns if self._rank else out.view(*columns.shape[:-1], out.shape[1])


def _map(path: Path, size: int) -> mmap.mmap:
    """Return a file of zeros that every rank maps; the first rank to come makes it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
