"""Communication between the ranks of a group: messages of rank 0 to the others, all-reduce and gather of activations.

mpi4py carries the messages. Activations go through shared memory on the CPU and through NCCL on GPUs. A blocking
receive of MPI spins, which takes a core away from the computation; so a follower polls, and sleeps if nothing has come
for a while.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import torch

from handlers.ranks.shm_allreduce import SHARED_TYPES, ShmAllReduce
from handlers.step_loop import EngineLostError
from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.ranks import Rank

_BUSY_S = 0.02  # after a message a follower polls for so long without sleeping, so that the next step begins at once
_PAUSE_S = 0.001


class GroupBrokenError(EngineLostError):
    """A step failed on this rank alone: the ranks are out of step, and the worker has to end."""


class Communicator:
    """The group of `rank`, for one thread at a time. All ranks call all_reduce and gather_columns in the same order.

    Raises ModelLoadError if mpi4py is missing or belongs to another MPI than the launcher.
    """

    def __init__(self, rank: Rank) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ModelLoadError(f"the MPI engine needs the extra 'mpi' ({error}); install lmi-server[mpi]") from error
        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        self._own = rank
        self.rank = rank.rank
        self.size = rank.size
        if self._world.size != rank.size:
            raise ModelLoadError(
                f"mpi4py sees {self._world.size} of {rank.size} ranks: it was built for another MPI than this mpirun;"
                " install mpi4py and mpirun from the same source"
            )

    def broadcast(self, message: bytes) -> None:
        """Send a message from rank 0 to all other ranks."""
        requests = [self._world.Isend([message, self._mpi.BYTE], other) for other in range(1, self.size)]
        self._mpi.Request.Waitall(requests)

    def receive(self) -> bytes:
        """Wait for the next message from rank 0 and return it."""
        status = self._mpi.Status()
        began = time.monotonic()
        while not self._world.Iprobe(source=0, status=status):
            if time.monotonic() - began > _BUSY_S:
                time.sleep(_PAUSE_S)
            else:
                os.sched_yield()  # the front end and its clients need the core while rank 0 samples
        message = bytearray(status.Get_count(self._mpi.BYTE))
        self._world.Recv([message, self._mpi.BYTE], source=0)
        return bytes(message)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks; on the CPU in the order of the ranks, so that all have the same bits."""
        if partial.is_cuda:
            torch.distributed.all_reduce(partial)
            return partial
        if partial.dtype not in SHARED_TYPES:
            return torch.sum(self._gather(partial), dim=0)
        return self.shm.all_reduce(partial)

    @functools.cached_property
    def shm(self) -> ShmAllReduce:
        """The shared memory for tensors on the CPU whose type is one of SHARED_TYPES."""
        return ShmAllReduce(self._own)

    def gather_columns(self, columns: torch.Tensor) -> torch.Tensor:
        """Return on rank 0 the columns (last dimension) of all ranks side by side, on the other ranks their own."""
        columns = columns.contiguous()
        if columns.is_cuda:
            return torch.cat(tuple(self._gather(columns)), dim=-1)
        if columns.dtype in SHARED_TYPES:
            return self.shm.gather_columns(columns)
        if self.rank:
            self._world.Gather(self._buffer(columns), None)
            return columns
        gathered = columns.new_empty((self.size, *columns.shape))
        self._world.Gather(self._buffer(columns), self._buffer(gathered))
        return torch.cat(tuple(gathered), dim=-1)

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        """(...) of each rank -> (ranks, ...)."""
        part = part.contiguous()
        gathered = part.new_empty((self.size, *part.shape))
        if part.is_cuda:
            torch.distributed.all_gather_into_tensor(gathered, part)
        else:
            self._world.Allgather(self._buffer(part), self._buffer(gathered))
        return gathered

    def _buffer(self, tensor: torch.Tensor) -> list[Any]:
        return [tensor.view(torch.uint8).numpy(), self._mpi.BYTE]
