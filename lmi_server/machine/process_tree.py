"""Finds and kills the processes of a Unix session: a worker and everything that it started.

A session is the one mark that children inherit and that neither mpirun nor a shell changes: both make process groups
of their own, and an orphan gets another parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_STATE, _SESSION = 0, 3  # among the fields of /proc/PID/stat behind the name
_ENDED = (b"Z", b"X")
_RESOURCE_TRACKER = b"from multiprocessing.resource_tracker import main"
_PASSES = 3  # a process may start another one between the listing and its end
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that happens (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_session(leader: int) -> None:
    """Kill a process that leads a session, and every other process of the session.

    Resource trackers of Python's multiprocessing are left alone: each ends by itself after the processes that share it,
    and first removes the shared memory that they have left behind. Raises OSError as `session_members` does.
    """
    if not _PROC.is_dir():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
    for _ in range(_PASSES):
        found = [pid for pid in session_members(leader) if _RESOURCE_TRACKER not in _read(pid, "cmdline")]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def session_members(leader: int) -> Iterator[int]:
    """Yield the processes of the session of `leader`, including itself while it runs; none without /proc.

    Raises OSError if /proc cannot be read, for example because no file descriptor is free.
    """
    for name in os.listdir(_PROC) if _PROC.is_dir() else ():  # unlike Path.glob, which hides errors
        fields = _read(int(name), "stat").rpartition(b")")[2].split() if name.isdecimal() else ()
        if fields and int(fields[_SESSION]) == leader and fields[_STATE] not in _ENDED:
            yield int(name)


def is_stopped(pid: int) -> bool:
    """Return whether a signal (SIGSTOP) has stopped the process; only SIGCONT lets it continue."""
    with contextlib.suppress(OSError):
        return _read(pid, "stat").rpartition(b")")[2].split()[_STATE : _STATE + 1] == [b"T"]
    return False


def _read(pid: int, name: str) -> bytes:
    """Return a file of /proc about a process; b"" if the process has ended, or is hidden from this user."""
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
