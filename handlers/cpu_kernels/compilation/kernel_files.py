"""Files that hold compiled kernels: they are written whole, and a file that other users can write is not read.

What they hold runs in this process, as machine code and as a pickle. So a file has to be as safe as the sources of the
kernels: its owner is root, this user, or the owner of these sources, and no other user can write it. A user who can
rename files in the folder can then only remove kernels. Root's group may write: containers run with it under any user
id.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import uuid
from pathlib import Path

_MAX_BYTES = 2**26  # the largest kernel has less than a hundredth of it
_DIGEST_BYTES = hashlib.sha256().digest_size
_ROOTS_GROUP = 0
PARTIAL = ".partial"
"""The suffix of a file that is being written, or whose writer was killed."""


class NotTrustedError(OSError):
    """Other users can have written the file, or it is damaged."""


def read(path: Path) -> bytes:
    """Return what a file holds. Raises NotTrustedError, FileNotFoundError or another OSError."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        doubt = _doubt(os.fstat(file.fileno()))
        if doubt is not None:
            raise NotTrustedError(doubt)
        return file.read(_MAX_BYTES)


def write(path: Path, data: bytes) -> None:
    """Write a file that others can read, and only this user can write. Raises OSError."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:16]}{PARTIAL}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as file:
            file.write(data)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def is_trusted(path: Path) -> bool:
    """Return whether there is a file that `read` reads."""
    try:
        return _doubt(path.lstat()) is None
    except OSError:
        return False


def signed(identity: str, data: bytes) -> bytes:
    """Return data behind a digest of it and of what it is."""
    return _digest(identity, data) + data


def verified(identity: str, signed_data: bytes) -> bytes:
    """Return the data that `signed` was given. Raises NotTrustedError if it is damaged, or of another identity."""
    digest, data = signed_data[:_DIGEST_BYTES], signed_data[_DIGEST_BYTES:]
    if digest != _digest(identity, data):
        raise NotTrustedError("it is damaged, or another version wrote it")
    return data


def _digest(identity: str, data: bytes) -> bytes:
    return hashlib.sha256(identity.encode() + b"\0" + data).digest()


def _doubt(found: os.stat_result) -> str | None:
    """Return why a file is not to be trusted."""
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if found.st_uid not in (0, os.geteuid(), Path(__file__).stat().st_uid):
        return f"it belongs to the user {found.st_uid}"
    if found.st_mode & stat.S_IWOTH:
        return "every user can write it"
    if found.st_mode & stat.S_IWGRP and found.st_gid != _ROOTS_GROUP:
        return f"the group {found.st_gid} can write it"
    return None
