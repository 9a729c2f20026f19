"""Forks for programs that others start: a rank of mpirun, a worker of Ray. One costs no imports then. For tests only.

The other program starts `python fork_requests.py SOCKET WORD...`, which imports next to nothing. It gives these words,
its variables and its files to a process that has imported everything, and that one forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from typing import NamedTuple

_LARGEST = 1 << 20  # bytes of a message


class Asked(NamedTuple):
    """What a fork is to be: the words, the variables and the directory, and standard input, output and error."""

    words: list[str]
    variables: dict[str, str]
    directory: str
    files: list[int]


class Forks:
    """Forks for each process that connects. The one ends with the other, and with the same exit code."""

    def __init__(self, listener: socket.socket, prepare: Callable[[dict[str, str]], None] = lambda _: None) -> None:
        """Call `prepare` with the variables of each process that connects, before the fork."""
        self._listener = listener
        self._prepare = prepare
        self._events = selectors.DefaultSelector()
        self._events.register(listener, selectors.EVENT_READ)

    def next_fork(self) -> Asked:
        """Return in each fork, and never in this process."""
        while True:
            for key, _ in self._events.select():
                if key.fileobj is not self._listener:
                    self._end(*key.data)
                elif (asked := self._fork()) is not None:
                    return asked

    def _fork(self) -> Asked | None:
        connection, _ = self._listener.accept()
        data, files, *_ = socket.recv_fds(connection, _LARGEST, 3)
        asked = Asked(**json.loads(data), files=files)
        self._prepare(asked.variables)
        pid = os.fork()
        if pid == 0:
            self._events.close()  # a collection of garbage would close its file, or what has the number by then
            return asked
        for file in files:
            os.close(file)
        fork = pid, os.pidfd_open(pid), connection
        for source in fork[1:]:
            self._events.register(source, selectors.EVENT_READ, fork)
        return None

    def _end(self, pid: int, handle: int, connection: socket.socket) -> None:
        """Kill a fork, which may have ended by itself, and tell the process that stands for it, which may be gone."""
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


def stand_for_fork(path: str, words: list[str]) -> int:
    """Have another process fork, and return the exit code of the fork when it has ended."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    asked = {"words": words, "variables": dict(os.environ), "directory": os.getcwd()}
    socket.send_fds(connection, [json.dumps(asked).encode()], [0, 1, 2])
    code = int(connection.recv(_LARGEST) or b"1")
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(stand_for_fork(sys.argv[1], sys.argv[2:]))
