"""Writes files, directories and links below one directory, and nowhere else, whatever the archive says.

Every directory on the way is looked at before something is made in it. No other process writes to the tree, so a
directory that was one stays one, and no step can leave the tree through a link, also one that another entry made.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

from lmi_server.artifacts.unpacking.limits import Allowance, UnsafeEntryError
from lmi_server.artifacts.unpacking.names import HERE, check_symbolic_link, link_out
from lmi_server.contract.texts.quoting import excerpt

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Tree:
    """The directory `root`, empty at first; no other process writes to it."""

    def __init__(self, root: Path, allowance: Allowance) -> None:
        self._allowance = allowance
        self._root = root.resolve()
        self._directories = {HERE}  # that are there; none is ever moved or removed
        self._links: list[tuple[PurePosixPath, str]] = []

    def make_directory(self, path: PurePosixPath) -> None:
        """Make a directory, unless it is there. Raises UnsafeEntryError, as all these methods do."""
        if path in self._directories:
            return
        self.make_directory(path.parent)
        kind = self._kind(path)
        if kind is None:
            self._allowance.take()  # no entry may name it
            os.mkdir(self._root / path)
        elif kind != stat.S_IFDIR:
            raise UnsafeEntryError("leads through a link" if kind == stat.S_IFLNK else "leads through a file")
        self._directories.add(path)

    def new_file(self, path: PurePosixPath) -> int:
        """Return the descriptor of a new and empty file; it replaces an earlier file, but not what is linked to it."""
        self._make_room(path)
        return os.open(self._root / path, _NEW_FILE, 0o666)

    def make_symbolic_link(self, path: PurePosixPath, target: str) -> None:
        """Make a link. `check_links` must be called when everything is written: its target may come later."""
        self._make_room(path)
        check_symbolic_link(path, target)
        os.symlink(target, self._root / path)
        self._links.append((path, target))

    def make_hard_link(self, path: PurePosixPath, linked: PurePosixPath) -> None:
        """Make a second name of the file `linked`, which must be a file: of a link, it would lead elsewhere."""
        if linked.parent not in self._directories or self._kind(linked) != stat.S_IFREG:
            raise _no_file(linked)
        if path != linked:
            self._make_room(path)
            os.link(self._root / linked, self._root / path, follow_symlinks=False)

    def check_links(self) -> None:
        """Raise UnsafeEntryError if a symbolic link leads out of the tree, as the kernel follows it."""
        inside = _real_path(self._root)
        for path, target in self._links:
            real = _real_path(self._root / path)
            if real is not None and real != inside and not real.startswith(f"{inside}/"):
                raise link_out(target)

    def _make_room(self, path: PurePosixPath) -> None:
        """Make the directory of a new entry, and remove an earlier file of its name, but no link and no directory."""
        if path == HERE:
            raise UnsafeEntryError("has no name")
        self.make_directory(path.parent)
        kind = self._kind(path)
        if kind == stat.S_IFLNK:
            raise UnsafeEntryError("leads through a link")
        if kind == stat.S_IFDIR:
            raise UnsafeEntryError("has the name of a directory before it")
        if kind is not None:
            os.unlink(self._root / path)

    def _kind(self, path: PurePosixPath) -> int | None:
        """Return what is at a path in a directory of the tree, None for nothing."""
        try:
            return stat.S_IFMT(os.lstat(self._root / path).st_mode)
        except FileNotFoundError:
            return None


def _real_path(path: Path) -> str | None:
    """Return where the kernel gets to by a path; None if that is nothing.

    It follows links itself: to look at each step of 40 links through 100 directories takes a thousand times as long.
    """
    try:
        found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.readlink(f"/proc/self/fd/{found}")
    finally:
        os.close(found)


def _no_file(linked: PurePosixPath) -> UnsafeEntryError:
    return UnsafeEntryError(f"is a link to {excerpt(str(linked))}, which is no file before it")
