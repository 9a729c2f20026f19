"""Sums over the ranks of one machine through memory that they share.

Each rank copies its part to its own place, says so, and adds up the parts of all as they come. MPI's collectives copy
once more, and what waits in them never lets go of its core, which others need on a machine with a core per rank.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import torch

from handlers.rolling_batch.attention import as_numpy
from lmi_server.ranks import Rank

SUMMED_TYPES = (torch.float32, torch.bfloat16)
_PIECE = 64 * 1024  # elements that are added up at a time: they stay in the processor's cache
_LINE = 64  # bytes of a cache line: each rank counts on one of its own


class SharedSums:
    """What `rank` needs to take part; all ranks add up the same shapes in the same order."""

    def __init__(self, rank: Rank) -> None:
        from handlers.rolling_batch.kernels import sum_of_ranks

        counts = rank.size * _LINE
        self._memory = np.frombuffer(
            _mapped(Path(rank.directory) / "sums", counts + rank.size * 2 * _PIECE * 4), np.uint8
        )
        places = self._memory[counts:]
        self._places = {
            torch.float32: places.view(np.float32).reshape(rank.size, 2, _PIECE),
            torch.bfloat16: places.view(np.uint16).reshape(rank.size, 4, _PIECE)[:, ::2],
        }
        self._kernel = sum_of_ranks
        self._counts = np.uintp(self._memory.ctypes.data)
        self._rank = rank.rank
        self._count = 0
        self._total = np.empty(_PIECE, np.float32)

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of `part`, of one of SUMMED_TYPES, over all ranks; the bits are the same on all."""
        part = part.contiguous()
        out = torch.empty_like(part)
        self._count = self._kernel(
            as_numpy(part.view(-1)),
            as_numpy(out.view(-1)),
            self._places[part.dtype],
            self._counts,
            _LINE,
            self._rank,
            self._count,
            self._total,
        )
        return out


def _mapped(path: Path, size: int) -> mmap.mmap:
    """Return a file of zeros that every rank maps; whoever comes first makes it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
