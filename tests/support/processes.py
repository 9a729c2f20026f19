"""Processes of the machine, as /proc shows them."""

from __future__ import annotations

import os
from pathlib import Path


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def worker_of(server: int) -> int:
    """Return the first worker of a server: the process itself, or mpirun.

    Workers lead sessions. The processes that a killed worker leaves become children of the server, too, until it has
    waited for them.
    """
    return next(pid for pid in children(server) if is_running(pid) and os.getsid(pid) == pid)
