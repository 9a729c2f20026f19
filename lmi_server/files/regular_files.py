"""Reads files that others have written, without waiting for a named pipe, a device or a far too large file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 1 << 24
"""Of a file with settings."""


def read_regular(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return what is in a file. Raises OSError if it cannot be read, is no file, or has more than `max_bytes` bytes."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"is larger than {max_bytes >> 20} MiB; make it shorter", str(path))
    return data


def open_regular(path: Path) -> BinaryIO:
    """Return a file, open to be read. Raises OSError if it cannot be read, or is no file."""
    # Without O_NONBLOCK, opening a named pipe waits for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "is a pipe or a device; put a file there", str(path))
