"""The identity of a file's contents, without reading it."""

from __future__ import annotations

import os
from pathlib import Path

FileState = tuple[int, int, int] | None
"""The number, time of change and size of a file; None if there is none."""


def file_state(path: str | Path) -> FileState:
    """Return the state of the file at `path`; None too if this process may not look at it."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
