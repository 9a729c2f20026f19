"""The ranks of a worker that is an MPI group: what the front end and each of the ranks know of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

RANK_BYTES = 4
"""The first bytes on the connection of a rank: its number, big-endian."""

_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RankGroup:
    """`size` ranks on this machine; `directory` holds their files, `port` is free for a rendezvous."""

    size: int
    directory: str
    port: int

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of every rank, by the names of torch.distributed, and DeepSpeed's LOCAL_SIZE.

        Each rank gets an equal share of the cores, unless `inherited` has OMP_NUM_THREADS.
        """
        size = str(self.size)
        threads = max(1, len(os.sched_getaffinity(0)) // self.size)
        return {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "LOCAL_SIZE": size,
            "MASTER_ADDR": _ADDRESS,
            "MASTER_PORT": str(self.port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", str(threads)),
            "MKL_DYNAMIC": "FALSE",
        }

    @property
    def litter(self) -> str:
        """Return a pattern of the shared memory that DeepSpeed leaves behind."""
        return f"deepspeed_allreduce_buffer_{os.getuid()}_{_ADDRESS}_{self.port}_*"


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of `size`; `directory` is that of the group, "" if there is no group."""

    rank: int
    size: int
    directory: str
