"""The process that makes the lines of the access log when there are many.

The event loop and all threads of the server share one interpreter, so that lines which another thread makes would take
the loop's time. The process gets requests as msgpack over a pair of sockets, and answers with their lines. It ends with
the server, whose end of the pair is closed then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe

import msgspec

from frontend.request_lines import Batches, lines_of

logger = logging.getLogger(__name__)

_LIMIT_S = 10.0  # for an answer, which takes some milliseconds
_END_LIMIT_S = 1.0
_NICENESS = 10  # lines may be late, answers may not; a tenth of a busy core is more than they take


class LineProcess:
    """Starts the process when it is needed first, and asks it for lines. One thread asks; another one may end it.

    If the process fails, there is a warning in the log, and no other one is started.
    """

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False

    def lines_of(self, work: Batches) -> str | None:
        """Return the lines of the requests; None if the process cannot make them, and the caller is to do so."""
        with self._asking:
            if self._is_over:
                return None
            try:
                connection = self._connection or self._start()
                connection.send_bytes(msgspec.msgpack.encode(work))
                if not connection.poll(_LIMIT_S):
                    raise TimeoutError(f"no answer within {_LIMIT_S:g} s")
                return connection.recv_bytes().decode()
            except (OSError, EOFError) as error:
                reason = str(error) or "it has ended"
                self._close()
        logger.warning("the process that makes the lines of the access log failed (%s); the server makes them", reason)
        return None

    def end(self) -> None:
        """End the process; whoever asks from now on makes the lines."""
        # The thread that writes may be stuck, because nobody reads the log. Then the process ends with the server.
        if self._asking.acquire(timeout=_END_LIMIT_S):
            try:
                self._close()
            finally:
                self._asking.release()

    def _start(self) -> Connection:
        self._connection, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-P", "-m", "frontend.line_process", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        return self._connection

    def _close(self) -> None:
        self._is_over = True
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()  # it may hang; what it has answered is all that it has done
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_LIMIT_S)


def main(fd: int) -> None:
    """Answer requests that come over the file descriptor, until its other end is closed."""
    os.nice(_NICENESS)
    # They go to all processes of a terminal. The server decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    decoder = msgspec.msgpack.Decoder(Batches)
    with contextlib.suppress(EOFError, OSError), Connection(fd) as connection:
        while True:
            connection.send_bytes(lines_of(decoder.decode(connection.recv_bytes())).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
