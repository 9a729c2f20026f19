"""Handlers that run as a group of ranks: each rank writes its number to a file, and fails if a file asks it to."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from handlers.echo.handler import EchoHandler
from handlers.echo.options import EchoOptions
from lmi_server.contract.handler import ModelInfo
from lmi_server.machine.environment import own_rank

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")


class RankHandler(EchoHandler):
    """Echoes on rank 0; each rank writes its variables into the model directory.

    The options that it gets are those of the engine that the directory names, which says that it runs on ranks.

    A file "stop-N" or "die-N" there makes rank N stop or die while it loads, the first time.
    """

    async def start(self, model_dir: str, options: Any) -> ModelInfo:
        self._join(Path(model_dir))
        return await super().start(model_dir, EchoOptions())

    def follow(self, model_dir: str, options: Any) -> None:
        self._join(Path(model_dir))
        while not self._world.iprobe(source=0):  # a rank that waits in a collective keeps a core busy
            time.sleep(0.02)
        assert self._world.recv(source=0) == "stop"

    def _join(self, directory: Path) -> None:
        rank = own_rank().rank
        print(f"rank {rank} loads")
        for fault, number in (("stop", signal.SIGSTOP), ("die", signal.SIGKILL)):
            marker = directory / f"{fault}-{rank}"
            if marker.exists():
                marker.unlink()
                os.kill(os.getpid(), number)
        values = [os.environ.get(name, "") for name in _VARIABLES]
        (directory / f"rank-{rank}").write_text(" ".join([str(os.getpid()), *values]))
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        assert self._world.allgather(rank) == list(range(own_rank().size))

    async def stop(self) -> None:
        for rank in range(1, own_rank().size):
            self._world.send("stop", dest=rank)
