"""Finds and kills what a worker has started: its Unix session, and processes that have left it.

A session is a mark that children inherit and that neither mpirun nor a shell changes: both make process groups of their
own, and an orphan gets another parent. A daemon leaves the session, so that each worker also has a variable of its own
in its environment, which its children inherit too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

WORKER_VARIABLE = "LMI_WORKER"
"""The variable that marks the processes of a worker: no two workers have the same value."""

_PROC = Path("/proc")
_STATE, _PARENT, _SESSION = 0, 1, 3  # among the fields of /proc/PID/stat behind the name
_TIMES = slice(11, 15)  # utime, stime, cutime, cstime
_ENDED = (b"Z", b"X")
_RESOURCE_TRACKER = b"from multiprocessing.resource_tracker import main"
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PASSES = 3  # a process may start another one between the listing and its end
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class _Process(NamedTuple):
    parent: int
    session: int


def tree_resident_bytes(pid: int) -> int:
    """Return the memory in RAM of a process and of those that its main thread has started; 0 if it is gone.

    What several of these processes share counts once for each.
    """
    try:
        pages = int((_PROC / str(pid) / "statm").read_bytes().split()[1])
        children = (_PROC / str(pid) / "task" / str(pid) / "children").read_bytes().split()
    except OSError:
        return 0
    return pages * _PAGE + sum(tree_resident_bytes(int(child)) for child in children)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that happens (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends (Linux only).

    Otherwise the first process of the machine would, and nobody could tell whom a daemon belongs to.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_family(leader: int, mark: str) -> None:
    """Kill a worker that leads a session, and what it has started.

    That is every process of the session, every process below this one with `mark` as its WORKER_VARIABLE, and all
    below these. Resource trackers of Python's multiprocessing are left alone: each ends by itself after the processes
    that share it, and first removes the shared memory that they have left behind. Raises OSError as `_running` does.
    """
    if not _PROC.is_dir():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
    for _ in range(_PASSES):
        if not _kill_all(_family(leader, f"{WORKER_VARIABLE}={mark}".encode())):
            return


def kill_descendants() -> None:
    """Kill every process below this one but resource trackers. Raises OSError as `_running` does."""
    for _ in range(_PASSES):
        if not _kill_all(_below({os.getpid()}, _running())):
            return


def session_members(leader: int) -> Iterator[int]:
    """Yield the processes of the session of `leader`, including itself while it runs; none without /proc.

    Raises OSError as `_running` does.
    """
    return (pid for pid, process in _running().items() if process.session == leader)


def with_descendants(pid: int) -> set[int]:
    """Return a process and every one below it. Raises OSError as `_running` does."""
    return {pid} | _below({pid}, _running())


def processor_ticks(pid: int) -> int:
    """Return the processor time of a process, with that of children that it has waited for; 0 if it has ended."""
    return sum(map(int, _stat(pid)[_TIMES]))


def adopted_zombies() -> set[int]:
    """Return the children of this process that have ended, have not been waited for, and have another session."""
    own = os.getsid(0)
    fields = {pid: _stat(pid) for pid in _children(os.getpid())}
    return {pid for pid, stat in fields.items() if stat and stat[_STATE] == b"Z" and int(stat[_SESSION]) != own}


def is_stopped(pid: int) -> bool:
    """Return whether a signal (SIGSTOP) has stopped the process; only SIGCONT lets it continue."""
    with contextlib.suppress(OSError):
        return _stat(pid)[_STATE : _STATE + 1] == [b"T"]
    return False


def _family(leader: int, mark: bytes) -> set[int]:
    running = _running()
    found = {pid for pid, process in running.items() if process.session == leader}
    found |= {pid for pid in _below({os.getpid()}, running) - found if mark in _read(pid, "environ").split(b"\0")}
    return found | _below(found, running)


def _below(ancestors: Collection[int], running: dict[int, _Process]) -> set[int]:
    """Return all processes below `ancestors`."""
    found: set[int] = set()
    level = set(ancestors)
    while level := {pid for pid, process in running.items() if process.parent in level} - found:
        found |= level
    return found


def _kill_all(pids: Collection[int]) -> bool:
    """Kill `pids` but resource trackers; return whether there were any."""
    found = [pid for pid in pids if _RESOURCE_TRACKER not in _read(pid, "cmdline")]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def _running() -> dict[int, _Process]:
    """Return the processes of this machine that have not ended; none without /proc.

    Raises OSError if /proc cannot be read, for example because no file descriptor is free.
    """
    names = os.listdir(_PROC) if _PROC.is_dir() else ()  # unlike Path.glob, which hides errors
    stats = {int(name): _stat(int(name)) for name in names if name.isdecimal()}
    return {
        pid: _Process(int(stat[_PARENT]), int(stat[_SESSION]))
        for pid, stat in stats.items()
        if stat and stat[_STATE] not in _ENDED
    }


def _children(pid: int) -> list[int]:
    """Return the children of a process: each thread has a list of those that it started."""
    lists = [file.read_bytes() for file in (_PROC / str(pid) / "task").glob("*/children")]
    return [int(child) for children in lists for child in children.split()]


def _stat(pid: int) -> list[bytes]:
    return _read(pid, "stat").rpartition(b")")[2].split()


def _read(pid: int, name: str) -> bytes:
    """Return a file of /proc about a process; b"" if the process has ended, or is hidden from this user."""
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
