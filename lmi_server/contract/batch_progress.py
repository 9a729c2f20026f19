"""A page of memory in which a worker tells how far it is with its batches, readable after its sudden end too.

The worker writes it before and after each batch; the pool reads it when it decides what to send, and what a dead worker
had begun. A message would do neither: it costs a system call and a wake-up per batch, and dies with the process.
"""

from __future__ import annotations

import mmap
import os

_SIZE = 4096
_BEGUN, _BEGUN_AT, _BATCH_S = range(3)  # words of eight bytes
_WEIGHT = 0.2  # of the last batch in the mean duration

READ_AHEAD_S = 0.002
"""A worker gets batches ahead that it will begin within so many seconds; one that takes longer gets none."""

_MOST_AHEAD = 16


class BatchProgress:
    """`begun` counts the batches that were handed to the handler. Times are those of time.monotonic(), one clock here.

    One process writes, with `begin` and `end`; each word is written at once.
    """

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, _SIZE)
        with memoryview(self._page) as view:
            self._counts = view.cast("Q")
            self._times = view.cast("d")

    @classmethod
    def create(cls) -> tuple[BatchProgress, int]:
        """Return a new page and a file descriptor of it, which is the caller's to close."""
        fd = os.memfd_create("lmi-batch-progress")
        os.truncate(fd, _SIZE)
        return cls(fd), fd

    @classmethod
    def create_file(cls, path: str) -> BatchProgress:
        """Return a new page that is a file, for a worker that inherits no file descriptor."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.truncate(fd, _SIZE)
        try:
            return cls(fd)
        finally:
            os.close(fd)

    @classmethod
    def open_file(cls, path: str) -> BatchProgress:
        """Return the page that `create_file` made."""
        fd = os.open(path, os.O_RDWR)
        try:
            return cls(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Give the page back; nothing can be read from it any more."""
        self._counts.release()
        self._times.release()
        self._page.close()

    @property
    def begun(self) -> int:
        return self._counts[_BEGUN]

    def running_s(self, now: float) -> float:
        """Return for how many seconds the handler has been at its batch; 0.0 where it has none."""
        begun_at = self._times[_BEGUN_AT]
        return now - begun_at if begun_at else 0.0

    def ahead(self, now: float) -> int:
        """Return how many batches the worker may have beside the one that it is at."""
        batch_s = self._times[_BATCH_S]
        if not batch_s or self.running_s(now) > READ_AHEAD_S:
            return 0
        return min(_MOST_AHEAD, int(READ_AHEAD_S / batch_s))

    def begin(self, now: float) -> None:
        self._times[_BEGUN_AT] = now
        self._counts[_BEGUN] += 1

    def end(self, now: float) -> None:
        spent_s = now - self._times[_BEGUN_AT]
        mean_s = self._times[_BATCH_S] or spent_s
        self._times[_BATCH_S] = mean_s + _WEIGHT * (spent_s - mean_s)
        self._times[_BEGUN_AT] = 0.0
