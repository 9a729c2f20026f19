"""Finds and kills what a worker has started: its Unix session, and processes that have left it.

A session is a mark that children inherit, and neither mpirun nor a shell changes it: both make process groups of their
own, and an orphan gets another parent. A daemon leaves the session, so each worker also has an environment variable of
its own, and its children inherit it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

WORKER_VARIABLE = "LMI_WORKER"
"""The variable that marks the processes of a worker: no two workers have the same value."""

_PROC = Path("/proc")
_RESOURCE_TRACKER = "from multiprocessing.resource_tracker import main"
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PASSES = 3  # a process may start a child between the listing and its end
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_GONE = (psutil.Error, ProcessLookupError)  # or hidden from this user


class _Process(NamedTuple):
    parent: int
    session: int


def tree_resident_bytes(pid: int) -> int:
    """Return the memory in RAM of a process and of the children of its main thread; 0 if it is gone.

    What several of these processes share counts once for each. It reads the files of these processes alone, unlike
    psutil, which looks at every process of the machine for children: each scrape of the metrics asks.
    """
    try:
        pages = int((_PROC / str(pid) / "statm").read_bytes().split()[1])
        children = (_PROC / str(pid) / "task" / str(pid) / "children").read_bytes().split()
    except OSError:
        return 0
    return pages * _PAGE + sum(tree_resident_bytes(int(child)) for child in children)


def kill_family(leader: int, mark: str) -> None:
    """Kill a worker that leads a session, and its descendants.

    That is every process of the session, every process below this one with `mark` as its WORKER_VARIABLE, and all below
    these. Resource trackers of Python's multiprocessing are left alone: each ends by itself after the processes that
    share it, and first removes the shared memory they have left behind. Raises OSError as `_running` does.
    """
    for _ in range(_PASSES):
        if not _kill_all(_family(leader, mark)):
            return


def kill_descendants() -> None:
    """Kill every process below this one but resource trackers. Raises OSError as `_running` does."""
    for _ in range(_PASSES):
        if not _kill_all(_below({os.getpid()}, _running())):
            return


def session_members(leader: int) -> Iterator[int]:
    """Yield the processes of the session of `leader`, including itself while it runs.

    Raises OSError as `_running` does.
    """
    return (pid for pid, process in _running().items() if process.session == leader)


def adopted_zombies() -> set[int]:
    """Return the children of this process that have ended, have not been waited for, and have another session."""
    own = os.getsid(0)
    # Each thread has a list of the children that it started.
    lists = [file.read_bytes() for file in (_PROC / str(os.getpid()) / "task").glob("*/children")]
    children = [int(child) for listed in lists for child in listed.split()]
    return {pid for pid in children if _status(pid) == psutil.STATUS_ZOMBIE and os.getsid(pid) != own}


def is_stopped(pid: int) -> bool:
    """Return whether a signal (SIGSTOP) has stopped the process; only SIGCONT lets it continue."""
    with contextlib.suppress(OSError):  # no file descriptor is free
        return bool(_status(pid) == psutil.STATUS_STOPPED)
    return False


def _status(pid: int) -> str | None:
    with contextlib.suppress(*_GONE):
        return str(psutil.Process(pid).status())
    return None


def _family(leader: int, mark: str) -> set[int]:
    running = _running()
    found = {pid for pid, process in running.items() if process.session == leader}
    found |= {pid for pid in _below({os.getpid()}, running) - found if _mark_of(pid) == mark}
    return found | _below(found, running)


def _mark_of(pid: int) -> str | None:
    with contextlib.suppress(*_GONE):
        return str(psutil.Process(pid).environ().get(WORKER_VARIABLE, ""))
    return None


def _below(ancestors: Collection[int], running: dict[int, _Process]) -> set[int]:
    """Return all processes below `ancestors`."""
    found: set[int] = set()
    level = set(ancestors)
    while level := {pid for pid, process in running.items() if process.parent in level} - found:
        found |= level
    return found


def _kill_all(pids: Collection[int]) -> bool:
    """Kill `pids` but resource trackers; return whether there were any."""
    is_any = False
    for pid in pids:
        with contextlib.suppress(*_GONE):
            if not any(_RESOURCE_TRACKER in argument for argument in psutil.Process(pid).cmdline()):
                is_any = True
                os.kill(pid, signal.SIGKILL)
    return is_any


def _running() -> dict[int, _Process]:
    """Return the processes of this machine that have not ended.

    Raises OSError if they cannot be listed, for example because no file descriptor is free.
    """
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(*_GONE), process.oneshot():
            if process.status() not in _ENDED:
                found[process.pid] = _Process(process.ppid(), os.getsid(process.pid))
    return found
