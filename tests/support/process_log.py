"""The standard error of a server that a test started, read all the time."""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections import deque
from queue import Empty, SimpleQueue
from typing import IO

LIMIT_S = 300.0
_REPORTED_LINES = 60
_open_logs: weakref.WeakSet[ProcessLog] = weakref.WeakSet()


def last_lines(since: float) -> str:
    """Return the last lines that every log got since a time of `time.time`, for the report of a test that failed.

    Servers of the whole session run on beside tests that do not use them, and their lines would hide the failure.
    """
    return "\n".join(filter(None, ("".join(log.last_lines(since)) for log in list(_open_logs))))


class ProcessLog:
    """Reads `stream` in a thread from the start to its end, and keeps its lines.

    A process may block, or drop lines of its log, once the pipe is full (64 KiB), so that somebody has to read it.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        assert stream is not None
        self.lines: list[str] = []
        """The lines that `wait_for` has seen; after `close`, all of them."""
        self._last: deque[tuple[float, str]] = deque(maxlen=_REPORTED_LINES)
        self._stream = stream
        self._unseen: SimpleQueue[str | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        _open_logs.add(self)

    def _read(self) -> None:
        for line in self._stream:
            self._last.append((time.time(), line))
            self._unseen.put(line)
        self._unseen.put(None)

    def last_lines(self, since: float = 0.0) -> list[str]:
        """Return the last lines of the log that came after a time of `time.time`."""
        return [line for at, line in list(self._last) if at >= since]

    def wait_for(self, pattern: str, limit_s: float = LIMIT_S) -> re.Match[str]:
        """Return the match of the next line that has one; fail after `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
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
        _open_logs.discard(self)
        while (line := self._unseen.get()) is not None:
            self.lines.append(line)
        self._unseen.put(None)
