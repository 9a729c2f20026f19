"""Sums over the ranks of one machine, and columns of all of them, through memory that they share.

Each rank copies its part to its own place, says so, and reads the parts of the others as they come. MPI's collectives
copy once more, and what waits in them never lets go of its core, which others need on a machine with a core per rank.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from handlers.rolling_batch.attention import as_numpy
from lmi_server.contract.ranks import Rank

SHARED_TYPES = (torch.float32, torch.bfloat16)
_PIECE = 64 * 1024  # elements that are shared at a time: they stay in the processor's cache
_LINE = 64  # bytes of a cache line: each rank counts on one of its own

# In the place of `RankMemory.arguments` for a model that is not split: of the same types, but one rank.
ONE_RANK = (np.empty((1, 4, 2), np.uint16)[:, ::2], np.uintp(0), _LINE, 0, 0, np.empty(0, np.float32))


class RankMemory:
    """What `rank` needs to take part; all ranks add up and join the same shapes in the same order."""

    def __init__(self, rank: Rank) -> None:
        from handlers.rolling_batch.cpu_kernels import kernels

        counts = rank.size * _LINE
        self._memory = np.frombuffer(
            _mapped(Path(rank.directory) / "shared", counts + rank.size * 2 * _PIECE * 4), np.uint8
        )
        places = self._memory[counts:]
        self._places = {
            torch.float32: places.view(np.float32).reshape(rank.size, 2, _PIECE),
            torch.bfloat16: places.view(np.uint16).reshape(rank.size, 4, _PIECE)[:, ::2],
        }
        self._sum, self._join = kernels.sum_of_ranks, kernels.join_ranks
        self._counts = np.uintp(self._memory.ctypes.data)
        self._rank, self._ranks = rank.rank, rank.size
        self.count = 0  # of the pieces that this rank has shared
        self._total = np.empty(_PIECE, np.float32)

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of `part`, of one of SHARED_TYPES, over all ranks; the bits are the same on all."""
        part = part.contiguous()
        out = torch.empty_like(part)
        self.count = self._sum(as_numpy(part.view(-1)), as_numpy(out.view(-1)), *self.arguments(part.dtype))
        return out

    def join_columns(self, columns: torch.Tensor) -> torch.Tensor:
        """(..., width) of each rank, of one of SHARED_TYPES -> on rank 0 (..., ranks * width), elsewhere `columns`."""
        part = columns.reshape(-1, columns.shape[-1]).contiguous()
        out = part.new_empty((part.shape[0], self._ranks * part.shape[1])) if self._rank == 0 else part
        self.count = self._join(as_numpy(part), as_numpy(out), *self.arguments(part.dtype))
        return columns if self._rank else out.view(*columns.shape[:-1], out.shape[1])

    def arguments(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return what a kernel takes to share parts of `dtype` itself; `count` is to be what it returns."""
        return self._places[dtype], self._counts, _LINE, self._rank, self.count, self._total


def _mapped(path: Path, size: int) -> mmap.mmap:
    """Return a file of zeros that every rank maps; whoever comes first makes it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
