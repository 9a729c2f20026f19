"""What the tests of MPI groups look at: the processes of a group and the files that it leaves behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from server_helpers import Server, running

from lmi_server.process_session import session_members

SHARED_MEMORY = Path("/dev/shm")


def litter(server: int) -> list[str]:
    """Return the directories of a server's groups that are there."""
    return [path.name for path in SHARED_MEMORY.glob(f"lmi-{server}-*")]


@contextlib.contextmanager
def clean(directory: Path) -> Iterator[Server]:
    """Serve a model; in the end nothing of its groups may be left."""
    with running(directory) as server:
        yield server
        if server.process.returncode is None:
            assert server.stop() == 0
    assert not litter(server.process.pid)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """Tell whether a process computes: one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def group_members(server: int) -> list[int]:
    """Return the processes of all groups of a server."""
    return [pid for launcher in children(server) for pid in session_members(launcher)]


def process_of_rank(server: int, rank: int) -> int:
    """Return the process of a rank, as mpirun numbers them."""
    mark = f"OMPI_COMM_WORLD_RANK={rank}".encode()
    found = [pid for pid in group_members(server) if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    return found[0]
