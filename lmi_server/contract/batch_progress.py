"""A page of shared memory in which a worker counts its batches, readable even after the worker's sudden end.

The worker writes the page before and after each batch. The pool reads it to decide whether the worker gets a batch in
advance, and, once the worker is dead, which batches its handler had begun. Messages could do neither. They would cost a
system call and a wake-up per batch, and one that is still in the dead worker's buffer is lost.

There is no lock. One process writes, the other only reads, and each value is one aligned word of eight bytes, which
x86-64 and ARM64 write and read at once. The reader may see the words of two moments, which makes a wrong guess about
speed at worst: `begun`, on which retries depend, is one word, and it is written before the handler sees the batch.
"""

from __future__ import annotations

import mmap
import os
from typing import Protocol

_SIZE = 4096
_BEGUN, _BEGUN_AT, _BATCH_S = range(3)  # words of eight bytes
_WEIGHT = 0.2  # of the last batch in the mean duration

READ_AHEAD_S = 0.002
"""A worker gets in advance the batches that it will begin within this time."""

_MAX_AHEAD = 16


class HandlerProgress(Protocol):
    """What the front end knows of the batches of a worker; see `BatchProgress`."""

    @property
    def begun(self) -> int:
        """Return the number of batches that the handler has got."""

    def running_s(self, now: float) -> float:
        """Return for how many seconds the current batch has been running; 0.0 if there is none."""

    def ahead(self, now: float) -> int:
        """Return how many batches the worker may hold beside the current one."""

    def close(self) -> None:
        """Release what it is read from."""


class BatchProgress:
    """The page. `begun` is the number of batches that the handler has got.

    Times are time.monotonic(), one clock for all processes of a machine. The worker calls `begin` and
    `end`; the pool calls the rest.
    """

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, _SIZE)
        with memoryview(self._page) as view:
            self._counts = view.cast("Q")
            self._times = view.cast("d")

    @classmethod
    def create(cls) -> tuple[BatchProgress, int]:
        """Return a new page and a file descriptor of it, which the caller must close."""
        fd = os.memfd_create("lmi-batch-progress")
        os.truncate(fd, _SIZE)
        return cls(fd), fd

    @classmethod
    def create_file(cls, path: str) -> BatchProgress:
        """Return a new page in a file, for a worker that inherits no file descriptor."""
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
        """Release the page; nothing can be read from it afterwards."""
        self._counts.release()
        self._times.release()
        self._page.close()

    @property
    def begun(self) -> int:
        return self._counts[_BEGUN]

    def running_s(self, now: float) -> float:
        """Return for how many seconds the current batch has been running; 0.0 if there is none."""
        begun_at = self._times[_BEGUN_AT]
        return now - begun_at if begun_at else 0.0

    def ahead(self, now: float) -> int:
        """Return how many batches the worker may hold beside the current one."""
        batch_s = self._times[_BATCH_S]
        if not batch_s or self.running_s(now) > READ_AHEAD_S:
            return 0
        return min(_MAX_AHEAD, int(READ_AHEAD_S / batch_s))

    def begin(self, now: float) -> None:
        self._times[_BEGUN_AT] = now
        self._counts[_BEGUN] += 1

    def end(self, now: float) -> None:
        spent_s = now - self._times[_BEGUN_AT]
        mean_s = self._times[_BATCH_S] or spent_s
        self._times[_BATCH_S] = mean_s + _WEIGHT * (spent_s - mean_s)
        self._times[_BEGUN_AT] = 0.0
