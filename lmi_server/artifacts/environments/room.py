"""Which environments are in use, and the removal of unused ones.

A model in use holds a shared lock (flock) of its environment's file `.used`, whose time is that of the last use. The
kernel frees the lock when the server ends, however it ends. An environment is removed while no server locks it:
this one, or another that shares the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

from lmi_server.artifacts.progress import Activity
from lmi_server.artifacts.store import lock_file, wait_for_lock

logger = logging.getLogger(__name__)

SIZE = "size"
"""The file in an environment's entry that has its bytes on the disk, as a number."""
_USED, _LOCK, _PARTIAL, _OUTDATED = ".used", ".lock", ".partial", ".outdated"


class Lease:
    """Keeps an environment from being removed until it is closed, or has no holder any more."""

    def __init__(self, descriptor: int) -> None:
        self.close = weakref.finalize(self, os.close, descriptor)


def lease(directory: Path, activity: Activity) -> Lease:
    """Return the lease of the environment in `directory`, which need not exist yet. Waits while it is being removed."""
    descriptor = wait_for_lock(_beside(directory, _USED), fcntl.LOCK_SH, activity, f"the removal of {directory}")
    held = Lease(descriptor)
    os.utime(descriptor)
    return held


def remove_unused(root: Path, allowed: int) -> bool:
    """Remove the unused environments below `root`, the least recently used first, down to `allowed` bytes.

    Also remove what a server that was killed has left half made. Returns whether an environment was removed.
    """
    for partial in [*root.glob(f"*{_PARTIAL}"), *root.glob(f"*{_OUTDATED}")]:
        with _lock_file(root / f"{partial.stem}{_LOCK}") as free:
            if free:
                shutil.rmtree(partial, ignore_errors=True)
    unused = sorted(_unused_environments(root), key=lambda found: found[0])
    room = sum(size for _, size, _ in unused)
    removed = False
    for _, size, directory in unused:
        if room <= allowed:
            break
        removed |= _remove(directory)
        room -= size
    _remove_lock_files(root)
    return removed


def _unused_environments(root: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield the time of the last use, the bytes and the directory of each environment without a holder."""
    for size_file in root.glob(f"*/{SIZE}"):
        directory = size_file.parent
        if directory.suffix in (_PARTIAL, _OUTDATED):  # what is nearly complete has its size already
            continue
        with contextlib.suppress(OSError, ValueError), _lock_file(_beside(directory, _USED)) as free:
            if free:
                yield _beside(directory, _USED).stat().st_mtime, int(size_file.read_text()), directory


def _remove(directory: Path) -> bool:
    """Remove one environment, unless a model has begun to use it."""
    with _lock_file(_beside(directory, _USED)) as free:
        if not free:
            return False
        logger.info("removing the environment %s, which no model uses", directory)
        outdated = _beside(directory, _OUTDATED)
        shutil.rmtree(outdated, ignore_errors=True)
        with contextlib.suppress(OSError):
            directory.rename(outdated)  # first, so that it is never there in part
        shutil.rmtree(outdated, ignore_errors=True)
        return True


def _remove_lock_files(root: Path) -> None:
    """Remove the lock files of environments that are not there, unless one of them is being made."""
    for name in {path.stem for suffix in (_USED, _LOCK) for path in root.glob(f"*{suffix}")}:
        directory = root / name
        if directory.exists():
            continue
        used, lock = _beside(directory, _USED), _beside(directory, _LOCK)
        # In the order of those who make one, which hold the first while they wait for the second.
        with contextlib.suppress(OSError), _lock_file(used) as unused, _lock_file(lock) as unmade:
            if unused and unmade and not directory.exists():
                lock.unlink()
                used.unlink()


@contextlib.contextmanager
def _lock_file(path: Path) -> Iterator[bool]:
    """Hold the lock of a file; yield False if it is taken, or it cannot be opened."""
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = lock_file(path)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _beside(directory: Path, suffix: str) -> Path:
    return directory.with_name(f"{directory.name}{suffix}")


def bytes_on_disk(directory: Path) -> int:
    """Return the bytes of all files below; what two environments share by hard links counts for each."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total
