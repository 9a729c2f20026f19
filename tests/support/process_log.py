"""The standard error of a server that a test started, read all the time."""

from __future__ import annotations

import re
import threading
import time
from queue import Empty, SimpleQueue
from typing import IO

_LIMIT_S = 300.0


class ProcessLog:
    """Reads `stream` in a thread from the start to its end, and keeps its lines.

    A process may block, or drop lines of its log, once the pipe is full (64 KiB), so that somebody has to read it.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        assert stream is not None
        self.lines: list[str] = []
        """The lines that `wait_for` has seen; after `close`, all of them."""
        self._stream = stream
        self._unseen: SimpleQueue[str | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            self._unseen.put(line)
        self._unseen.put(None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return the match of the next line that has one."""
        deadline = time.monotonic() + _LIMIT_S
        while (line := self._next(deadline)) is not None:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no {pattern!r} in the log:\n{''.join(self.lines)}")

    def _next(self, deadline: float) -> str | None:
        try:
            line = self._unseen.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            return None
        if line is None:
            self._unseen.put(None)  # the end stays the end for whoever asks again
        return line

    def close(self) -> None:
        """Read what is left, to the end of the stream, once its process has ended."""
        self._thread.join()
        self._stream.close()
        while (line := self._unseen.get()) is not None:
            self.lines.append(line)
        self._unseen.put(None)
