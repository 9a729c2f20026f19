"""The entries of a tar, in any compression that the standard library knows."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, Protocol, cast

from lmi_server.artifacts.unpacking.bounded import PIECE, ForwardStream
from lmi_server.artifacts.unpacking.limits import Allowance, UnsafeEntryError, entry_error
from lmi_server.artifacts.unpacking.names import safe_path
from lmi_server.artifacts.unpacking.tree import Tree

_OPENERS: tuple[tuple[bytes, Callable[[BinaryIO], object]], ...] = (
    (b"\x1f\x8b", gzip.open),
    (b"BZh", bz2.open),
    (b"\xfd7zXZ\0", lzma.open),
    (b"\x5d\0\0", lzma.open),  # the older format of xz, which has no mark of its own
)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def unpack_tar(archive: Path, tree: Tree, allowance: Allowance) -> None:
    """Write the entries of the tar `archive`. Raises ArtifactError, and what tarfile raises for damaged ones."""
    with archive.open("rb") as file, _decompress(file) as source:
        allowance.position = file.tell
        stream = ForwardStream(source, allowance)
        with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r:") as tar:
            for member in _members(tar, stream):
                try:
                    _unpack(member, tar, stream, tree, allowance)
                except UnsafeEntryError as error:
                    raise entry_error(member.name, error) from error


@contextmanager
def _decompress(file: BinaryIO) -> Iterator[BinaryIO]:
    start = file.read(8)
    file.seek(0)
    opener = next((opener for magic, opener in _OPENERS if start.startswith(magic)), None)
    if opener is None:
        yield file
        return
    with cast("BinaryIO", opener(file)) as source:
        yield source


def _members(tar: tarfile.TarFile, stream: ForwardStream) -> Iterator[tarfile.TarInfo]:
    """Yield each member before the next one is read, and keep none: tarfile would keep them all."""
    stream.expect_headers()
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # it has the attribute
        yield member
        stream.expect_headers()
    # tarfile takes a damaged header, as well as a block of zeros, for the end.
    if stream.last_read.strip(b"\0"):
        raise tarfile.ReadError("a header is damaged or cut")


def _unpack(
    member: tarfile.TarInfo, tar: tarfile.TarFile, stream: ForwardStream, tree: Tree, allowance: Allowance
) -> None:
    if member.size < 0:
        raise UnsafeEntryError("has a size below 0")
    allowance.take(member.size)
    path = safe_path(member.name)
    if member.isdir():
        tree.make_directory(path)
    elif member.issym():
        tree.make_symbolic_link(path, member.linkname)
    elif member.islnk():
        tree.make_hard_link(path, safe_path(member.linkname))
    elif member.isreg():
        stream.expect_data()
        with open(tree.new_file(path), "wb") as copy:
            _copy(member, tar, stream, copy, allowance)
            os.fchmod(copy.fileno(), member.mode & 0o755 | 0o600)
    else:
        raise UnsafeEntryError("is a device or another special file")
    allowance.report_position()


def _copy(
    member: tarfile.TarInfo, tar: tarfile.TarFile, stream: ForwardStream, copy: BinaryIO, allowance: Allowance
) -> None:
    source = _content(member, tar, stream)
    left = member.size
    while left:
        data = source.read(min(PIECE, left))
        if not data:
            raise tarfile.ReadError("unexpected end of data")
        copy.write(data)
        left -= len(data)
        allowance.count_written(len(data))


def _content(member: tarfile.TarInfo, tar: tarfile.TarFile, stream: ForwardStream) -> _Readable:
    if not member.issparse():
        stream.seek(member.offset_data)
        return stream
    source = tar.extractfile(member)
    assert source is not None  # it is a file
    return source
