"""Reads files that others have written, without waiting for a named pipe, a device or a far too large file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 1 << 24
"""Of a file with settings."""


def read_regular(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return what is in a file. Raises OSError if it cannot be read, is no file, or has more than `max_bytes` bytes."""
    # Without O_NONBLOCK, opening a named pipe waits for its writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "is a pipe or a device; put a file there", str(path))
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"is larger than {max_bytes >> 20} MiB; make it shorter", str(path))
    return data
