"""The processes of a session: what a worker started, in whatever process groups they are."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_STATE, _SESSION = 0, 3  # among the fields of /proc/PID/stat behind the name
_ENDED = ("Z", "X")
_RESOURCE_TRACKER = b"multiprocessing.resource_tracker"


def kill_session(leader: int) -> None:
    """Kill a process that leads a session, and every other process of the session.

    Left are the resource trackers of Python's multiprocessing. Each ends by itself after the processes that share it,
    and takes the names off the shared memory that those have left behind.
    """
    end = os.kill if _PROC.is_dir() else os.killpg
    with contextlib.suppress(ProcessLookupError):
        end(leader, signal.SIGKILL)
    for _ in range(2):  # the second time for what the first of them started meanwhile
        for pid in session_members(leader):
            if _RESOURCE_TRACKER not in _command_line(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def session_members(leader: int) -> Iterator[int]:
    """Yield the processes of the session that `leader` led, itself included while it runs; none without /proc."""
    for entry in _PROC.glob("[0-9]*"):
        fields = _fields(int(entry.name))
        if fields is not None and fields[_SESSION] == str(leader) and fields[_STATE] not in _ENDED:
            yield int(entry.name)


def is_stopped(pid: int) -> bool:
    """Tell whether a signal holds the process: it neither computes nor answers until another one lets it go on."""
    fields = _fields(pid)
    return fields is not None and fields[_STATE] == "T"


def _command_line(pid: int) -> bytes:
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""


def _fields(pid: int) -> list[str] | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()
