"""What the processes of a server on this machine use: processor time and memory, read from /proc."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lmi_server.processes.tree import processor_ticks, with_descendants

_PROC = Path("/proc")
_LISTENS = "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class Usage(NamedTuple):
    """Seconds of processor time since the start of the processes, and bytes of resident memory.

    A page that several processes share counts in each of them.
    """

    cpu_s: float
    memory_bytes: int


def listener(host: str, port: int) -> int | None:
    """Return the process that listens on the port; None if it is on another machine, hidden, or there is none."""
    if not _is_here(host):
        return None
    inodes = set(_listening(port))
    owners = {pid for pid in _pids() if inodes & set(_sockets(pid))}
    # A server may have forked processes that hold its socket too: the oldest of them is the server.
    return min(owners, default=None)


def usage(pid: int) -> Usage:
    """Return what a process and all below it use; zeros if it has ended."""
    pids = with_descendants(pid)
    ticks = sum(map(processor_ticks, pids))
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), sum(map(_resident, pids)))


def _is_here(host: str) -> bool:
    """Return whether an address is one of this machine: only such can be bound."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as trial:
            trial.bind(address)
    except OSError:
        return False
    return True


def _listening(port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on the port."""
    for name in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdecimal()] if _PROC.is_dir() else []


def _sockets(pid: int) -> Iterator[str]:
    """Yield the inodes of the sockets that a process holds; none if it belongs to another user, or has ended."""
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(_PROC / str(pid) / "fd"):
            with contextlib.suppress(OSError):
                if (found := _SOCKET.fullmatch(os.readlink(descriptor.path))) is not None:
                    yield found[1]


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
