"""What the processes of a server on this machine use: processor time and memory."""

from __future__ import annotations

import contextlib
import socket
from typing import NamedTuple

import psutil


class ProcessUsage(NamedTuple):
    """Seconds of processor time since the start of the processes, and bytes of resident memory.

    A page that several processes share counts in each of them.
    """

    cpu_s: float
    memory_bytes: int


def find_listener(host: str, port: int) -> int | None:
    """Return the process that listens on the port; None if it is on another machine, hidden, or there is none."""
    if not _is_here(host):
        return None
    with contextlib.suppress(psutil.AccessDenied):
        connections = psutil.net_connections("tcp")
        owners = [c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid]
        # A server may have forked processes that hold its socket too: the oldest of them is the server.
        return min(owners, default=None)
    return None


def measure_usage(pid: int) -> ProcessUsage:
    """Return what a process and all below it use; zeros if it has ended."""
    cpu_s, memory_bytes = 0.0, 0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess), each.oneshot():
                cpu_s += sum(each.cpu_times()[:4])  # of itself and of children that it has waited for
                memory_bytes += each.memory_info().rss
    return ProcessUsage(cpu_s, memory_bytes)


def _is_here(host: str) -> bool:
    """Return whether an address is one of this machine: only such can be bound."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as trial:
            trial.bind(address)
    except OSError:
        return False
    return True
