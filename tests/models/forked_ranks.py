"""Ranks as forks, as forked_workers.py has them for workers: a group under a real mpirun costs no imports.

For tests only. mpirun starts `python forked_ranks.py SOCKET PROGRAM...`, which imports next to nothing. It gives its
variables and its outputs to a process of the group's session that has imported everything, and that one forks the rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from typing import NamedTuple

_LARGEST = 1 << 20  # bytes of a message


class Asked(NamedTuple):
    """A rank: its program, its variables and working directory, and its standard output and error."""

    program: list[str]
    variables: dict[str, str]
    directory: str
    outputs: list[int]


class Forks:
    """Forks a rank for each process that connects. The one ends with the other, and with the same exit code."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._events = selectors.DefaultSelector()
        self._events.register(listener, selectors.EVENT_READ)

    def next_rank(self) -> Asked:
        """Return in each fork, and never in this process."""
        while True:
            for key, _ in self._events.select():
                if key.fileobj is not self._listener:
                    self._end(*key.data)
                elif (asked := self._fork()) is not None:
                    return asked

    def _fork(self) -> Asked | None:
        connection, _ = self._listener.accept()
        data, outputs, *_ = socket.recv_fds(connection, _LARGEST, 2)
        pid = os.fork()
        if pid == 0:
            self._events.close()  # a collection of garbage would close its file, or what has the number by then
            return Asked(**json.loads(data), outputs=outputs)
        for output in outputs:
            os.close(output)
        rank = pid, os.pidfd_open(pid), connection
        for source in rank[1:]:
            self._events.register(source, selectors.EVENT_READ, rank)
        return None

    def _end(self, pid: int, handle: int, connection: socket.socket) -> None:
        """Kill a rank, which may have ended by itself, and tell the process that stands for it, which may be gone."""
        if handle not in self._events.get_map():
            return  # both have ended at once
        for source in (handle, connection):
            self._events.unregister(source)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            connection.send(str(code).encode())
        connection.close()
        os.close(handle)


def stand_for_rank(path: str, program: list[str]) -> int:
    """Have a rank forked, and return its exit code when it has ended."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    asked = {"program": program, "variables": dict(os.environ), "directory": os.getcwd()}
    socket.send_fds(connection, [json.dumps(asked).encode()], [1, 2])
    code = int(connection.recv(_LARGEST) or b"1")
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(stand_for_rank(sys.argv[1], sys.argv[2:]))
