"""The processes of a session: what a worker started, in whatever process groups they are."""

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
_PASSES = 3  # the later ones are for what the processes of the first started meanwhile
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel end this process with the one that started it, however that ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_session(leader: int) -> None:
    """Kill a process that leads a session, and every other process of the session.

    Left are the resource trackers of Python's multiprocessing. Each ends by itself after the processes that share it,
    and takes the names off the shared memory that those have left behind. Raises OSError as `session_members` does.
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
    """Yield the processes of the session that `leader` led, itself included while it runs; none without /proc.

    Raises OSError where they cannot be looked at, as for want of file descriptors.
    """
    for name in os.listdir(_PROC) if _PROC.is_dir() else ():  # unlike Path.glob, which hides errors
        fields = _read(int(name), "stat").rpartition(b")")[2].split() if name.isdecimal() else ()
        if fields and int(fields[_SESSION]) == leader and fields[_STATE] not in _ENDED:
            yield int(name)


def is_stopped(pid: int) -> bool:
    """Tell whether a signal holds the process: it neither computes nor answers until another one lets it go on."""
    with contextlib.suppress(OSError):
        return _read(pid, "stat").rpartition(b")")[2].split()[_STATE : _STATE + 1] == [b"T"]
    return False


def _read(pid: int, name: str) -> bytes:
    """Return a file of /proc about a process; nothing once it has ended, or where it is hidden from other users."""
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
