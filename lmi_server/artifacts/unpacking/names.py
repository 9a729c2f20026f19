"""Names of entries as paths. What a name says is checked here; where it leads is checked by `tree.py`, on the disk."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

from lmi_server.artifacts.unpacking.limits import UnsafeEntryError
from lmi_server.contract.texts.quoting import excerpt

HERE = PurePosixPath()
_LONGEST = 2048  # bytes; the store's own directories must still fit into the longest path of Linux
_LONGEST_PART = 255  # bytes, of every file system of Linux
_DEEPEST = 100


def safe_path(name: str) -> PurePosixPath:
    """Return the path that an entry has below the target: "./a//b/." is a/b. Raises UnsafeEntryError."""
    _check_length(name)
    path = PurePosixPath(name)
    if path.is_absolute():
        raise UnsafeEntryError("is an absolute path")
    if ".." in path.parts:
        raise UnsafeEntryError("leads out of the archive")
    if "\\" in name or "\0" in name:
        raise UnsafeEntryError("holds a backslash or a null character, which no path in an archive may have")
    if len(path.parts) > _DEEPEST or any(len(os.fsencode(part)) > _LONGEST_PART for part in path.parts):
        raise UnsafeEntryError(
            f"is no path that can be written; allowed: {_DEEPEST} directories, names of {_LONGEST_PART} bytes"
        )
    return path


def check_symbolic_link(path: PurePosixPath, target: str) -> None:
    """Raise UnsafeEntryError unless the text of a link at `path` stays inside."""
    _check_length(target)
    link = PurePosixPath(target)
    upwards = len([part for part in link.parts if part == ".."])
    # ".." may stand only at the beginning, and only as often as there are directories above the link.
    leads_out = link.is_absolute() or upwards > len(path.parts) - 1
    if not target or "\0" in target or leads_out or ".." in link.parts[upwards:]:
        raise link_out(target)


def link_out(target: str) -> UnsafeEntryError:
    return UnsafeEntryError(f"is a link out of the archive ({excerpt(target)})")


def _check_length(name: str) -> None:
    try:
        length = len(os.fsencode(name))
    except UnicodeEncodeError:
        raise UnsafeEntryError("is no text that a file system can write") from None
    if length > _LONGEST:
        raise UnsafeEntryError(f"is longer than {_LONGEST} bytes")
