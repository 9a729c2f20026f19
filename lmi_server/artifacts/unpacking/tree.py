"""Writes files, directories and links below one directory, and nowhere else, whatever the archive says.

Every directory on the way is opened by its name in the directory above it, without following links, and everything is
made by name in such an open directory. So no step can leave the tree through a link, also one that another entry made.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path, PurePosixPath

from lmi_server.artifacts.unpacking.limits import Allowance, UnsafeEntryError
from lmi_server.artifacts.unpacking.names import HERE, check_symbolic_link, link_out
from lmi_server.contract.texts.quoting import excerpt

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ANY_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_DIRECTORY = (errno.ENOTDIR, errno.ELOOP)


class Tree:
    """The directory `root`, empty at first; no other process writes to it."""

    def __init__(self, root: Path, allowance: Allowance) -> None:
        self._allowance = allowance
        self._root = os.open(root, _DIRECTORY)
        # The directory of the last entry stays open: the next one is most often in the same. No directory is ever
        # moved or removed, so it still has that path.
        self._steps: tuple[str, ...] = ()
        self._last = os.dup(self._root)
        self._links: list[tuple[PurePosixPath, str]] = []

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._last)
        os.close(self._root)

    def make_directory(self, path: PurePosixPath) -> None:
        """Make a directory, unless it is there. Raises UnsafeEntryError, as all these methods do."""
        self._enter(path.parts)

    def new_file(self, path: PurePosixPath) -> int:
        """Return the descriptor of a new and empty file; it replaces an earlier file, but not what is linked to it."""
        parent = self._parent(path)
        try:
            return os.open(path.name, _NEW_FILE, 0o666, dir_fd=parent)
        except FileExistsError:
            _remove_file(path.name, parent)
            return os.open(path.name, _NEW_FILE, 0o666, dir_fd=parent)

    def make_symbolic_link(self, path: PurePosixPath, target: str) -> None:
        """Make a link. `check_links` must be called when everything is written: its target may come later."""
        parent = self._parent(path)
        check_symbolic_link(path, target)
        _remove_file(path.name, parent)
        os.symlink(target, path.name, dir_fd=parent)
        self._links.append((path, target))

    def make_hard_link(self, path: PurePosixPath, linked: PurePosixPath) -> None:
        """Make a second name of the file `linked`, which must be a file: of a link, it would lead elsewhere."""
        source_parent = self._open_parent_of_linked(linked)
        try:
            source = _open_linked(linked, source_parent)
            try:
                if path != linked:
                    self._link(path, linked, source_parent, os.fstat(source))
            finally:
                os.close(source)
        finally:
            os.close(source_parent)

    def check_links(self) -> None:
        """Raise UnsafeEntryError if a symbolic link leads out of the tree, as the kernel follows it."""
        inside = _path_of(self._root)
        for path, target in self._links:
            real = self._where(path)
            if real is not None and real != inside and not real.startswith(inside + b"/"):
                raise link_out(target)

    def _link(self, path: PurePosixPath, linked: PurePosixPath, source_parent: int, file: os.stat_result) -> None:
        parent = self._parent(path)
        _remove_file(path.name, parent)
        os.link(linked.name, path.name, src_dir_fd=source_parent, dst_dir_fd=parent, follow_symlinks=False)
        if not os.path.samestat(file, os.stat(path.name, dir_fd=parent, follow_symlinks=False)):
            os.unlink(path.name, dir_fd=parent)
            raise _no_file(linked)

    def _open_parent_of_linked(self, linked: PurePosixPath) -> int:
        try:
            return self._open(linked.parts[:-1])
        except OSError as error:
            if error.errno in (errno.ENOENT, *_NO_DIRECTORY):
                raise _no_file(linked) from None
            raise

    def _where(self, path: PurePosixPath) -> bytes | None:
        """Return the real path of what a link leads to; None if that is nothing."""
        parent = self._open(path.parts[:-1])
        try:
            found = os.open(path.name, os.O_PATH | os.O_CLOEXEC, dir_fd=parent)
        except OSError:
            return None
        finally:
            os.close(parent)
        try:
            return _path_of(found)
        finally:
            os.close(found)

    def _parent(self, path: PurePosixPath) -> int:
        if path == HERE:
            raise UnsafeEntryError("has no name")
        return self._enter(path.parts[:-1])

    def _enter(self, steps: tuple[str, ...]) -> int:
        """Return the descriptor of a directory, valid until the next call; make what is missing of it."""
        if steps != self._steps:
            directory = self._open(steps, make=True)
            os.close(self._last)
            self._steps, self._last = steps, directory
        return self._last

    def _open(self, steps: tuple[str, ...], *, make: bool = False) -> int:
        directory = os.dup(self._root)
        for name in steps:
            try:
                below = self._open_made(name, directory) if make else os.open(name, _DIRECTORY, dir_fd=directory)
            finally:
                os.close(directory)
            directory = below
        return directory

    def _open_made(self, name: str, parent: int) -> int:
        try:
            return os.open(name, _DIRECTORY, dir_fd=parent)
        except FileNotFoundError:
            self._allowance.take()  # no entry may name it
            os.mkdir(name, dir_fd=parent)
            return os.open(name, _DIRECTORY, dir_fd=parent)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY:
                raise
            is_link = stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
            raise UnsafeEntryError("leads through a link" if is_link else "leads through a file") from None


def _remove_file(name: str, parent: int) -> None:
    """Remove an earlier file of that name. Raises UnsafeEntryError if a link or a directory has the name."""
    try:
        kind = stat.S_IFMT(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return
    if kind == stat.S_IFLNK:
        raise UnsafeEntryError("leads through a link")
    if kind == stat.S_IFDIR:
        raise UnsafeEntryError("has the name of a directory before it")
    os.unlink(name, dir_fd=parent)


def _open_linked(linked: PurePosixPath, parent: int) -> int:
    try:
        source = os.open(linked.name or ".", _ANY_FILE, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            raise _no_file(linked) from None
        raise
    if not stat.S_ISREG(os.fstat(source).st_mode):
        os.close(source)
        raise _no_file(linked)
    return source


def _no_file(linked: PurePosixPath) -> UnsafeEntryError:
    return UnsafeEntryError(f"is a link to {excerpt(str(linked))}, which is no file before it")


def _path_of(descriptor: int) -> bytes:
    return os.readlink(b"/proc/self/fd/%d" % descriptor)
