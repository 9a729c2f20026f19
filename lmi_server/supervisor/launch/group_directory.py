"""The directory of a group of ranks, in shared memory if there is any: it goes with the group, or is swept later."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # directories there are from mkdtemp  # nosec B108
_ABANDONED_AFTER_S = 60.0  # ranks that outlive their server remove their directory within seconds


class GroupDirectory:
    """A directory that only this user can open. Its lock tells other servers that it is in use."""

    def __init__(self) -> None:
        in_memory = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
        self.path = tempfile.mkdtemp(prefix=f"lmi-{os.getpid()}-", dir=SHARED_MEMORY if in_memory else None)
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        shutil.rmtree(self.path, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove the directories of servers that were killed while a group was loading, when no rank could do it."""
    for path in _abandoned_directories():
        logger.info("removing %s, which a server that is gone has left in shared memory", path)
        shutil.rmtree(path, ignore_errors=True)


def _abandoned_directories() -> Iterator[Path]:
    for path in SHARED_MEMORY.glob("lmi-*-*"):
        with contextlib.suppress(OSError):  # another user's, in use, or gone meanwhile
            status = path.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _ABANDONED_AFTER_S and _is_free(path):
                yield path


def _is_free(path: Path) -> bool:
    """Return whether no server holds the directory; the name has the number of the process that made it."""
    if Path("/proc", path.name.split("-")[1]).exists():
        return False
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a server in another container has another number
    finally:
        os.close(lock)
    return True
