"""A file of lines that one process appends to, and that outlives its sudden end without half a line."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

LOCK = ".lock"
"""What the name of the file ends with that is locked; it stands beside the journal."""

_BLOCK = 1 << 20


class TakenError(OSError):
    """Another process writes the journal."""


class FileJournal:
    """Appends whole lines to `path`. Its methods may block and raise OSError, also once it is closed.

    The lock ends with its process, however that ends. It keeps only other processes away: this process opens a journal
    once. Threads may share it.
    """

    def __init__(self, path: Path) -> None:
        """Raise TakenError if another process has it."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:  # closes what is open if the next step fails
            self._lock = _open(_lock_of(path), opened)
            _take(self._lock, path.name)
            self._file = _open(path, opened)
            synchronize(path.parent)
            self._guard = threading.Lock()
            self._size = self._whole_size()
            opened.pop_all()

    def _whole_size(self) -> int:
        """Return where the last whole line ends: what follows was not written as a whole, and is written over."""
        end = os.fstat(self._file).st_size
        while end:
            start = max(0, end - _BLOCK)
            found = os.pread(self._file, end - start, start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
        return 0

    def blocks(self) -> Iterator[bytes]:
        """Yield what is there, in blocks of any size."""
        for start in range(0, self._size, _BLOCK):
            with self._guard:
                block = os.pread(self._file, min(_BLOCK, self._size - start), start)
            yield block

    def append(self, data: bytes) -> None:
        """Add whole lines, which outlive the machine's sudden end from the return on."""
        with self._guard:
            os.ftruncate(self._file, self._size)  # without what an append has left that failed, as on a full disk
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._size + written)
            os.fdatasync(self._file)
            self._size += len(data)

    def keep(self) -> None:
        """Do nothing: the lock says that this process lives."""

    def close(self) -> None:
        """Let another process have it."""
        with self._guard:
            os.close(self._file)
            os.close(self._lock)
            self._file = self._lock = -1


def remove_journal(path: Path) -> None:
    """Remove a journal that no other process has."""
    path.unlink(missing_ok=True)
    _lock_of(path).unlink(missing_ok=True)


def synchronize(directory: Path) -> None:
    """Have the names in a directory outlive the machine's sudden end."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _open(path: Path, opened: contextlib.ExitStack) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    opened.callback(os.close, file)
    return file


def _take(lock: int, name: str) -> None:
    """Lock a file. Raises TakenError if another process has it, other OSErrors if the file system has no locks."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise TakenError(f"another process has {name}") from error


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}{LOCK}")
