"""The entries of a zip."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, BinaryIO, cast

from lmi_server.artifacts.unpacking.bounded import PIECE, DirectoryBound
from lmi_server.artifacts.unpacking.limits import Allowance, UnsafeEntryError, entry_error
from lmi_server.artifacts.unpacking.names import safe_path
from lmi_server.artifacts.unpacking.tree import Tree
from lmi_server.contract.texts.quoting import excerpt

_LOCAL_HEADER = 30  # bytes, without name and extra field
_ENCRYPTED = 1
# zipfile decompresses at once what it has read of these, to any size; a little of it stays small.
_SMALL_PIECE = 16 << 10
_BOUNDED_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def unpack_zip(archive: Path, tree: Tree, allowance: Allowance) -> None:
    """Write the entries of the zip `archive`. Raises ArtifactError, and what zipfile raises for damaged ones."""
    with archive.open("rb") as file:
        source = DirectoryBound(file, allowance)
        allowance.position = file.tell
        with zipfile.ZipFile(cast("IO[bytes]", source)) as packed:
            source.opened = True
            _check_places(packed.infolist())
            for member in packed.infolist():
                try:
                    _unpack(member, packed, tree, allowance)
                except UnsafeEntryError as error:
                    raise entry_error(member.filename, error) from error


def _check_places(members: Sequence[zipfile.ZipInfo]) -> None:
    """Refuse entries that share their bytes: a small archive of such unpacks to a very large one."""
    before: zipfile.ZipInfo | None = None
    for member in sorted(members, key=lambda member: member.header_offset):
        if before is not None and member.header_offset < before.header_offset + _LOCAL_HEADER + before.compress_size:
            overlapped = UnsafeEntryError(f"lies within the bytes of '{excerpt(before.filename)}'")
            raise entry_error(member.filename, overlapped)
        before = member


def _unpack(member: zipfile.ZipInfo, packed: zipfile.ZipFile, tree: Tree, allowance: Allowance) -> None:
    allowance.take(member.file_size)
    path = safe_path(member.filename)
    kind = stat.S_IFMT(member.external_attr >> 16)  # the upper half is Unix's mode; 0 if made elsewhere
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise UnsafeEntryError("is a link or a special file")
    if member.flag_bits & _ENCRYPTED:
        raise UnsafeEntryError("is encrypted")
    if member.filename.endswith("/"):
        tree.make_directory(path)
    else:
        with open(tree.new_file(path), "wb") as copy:
            _copy(member, packed, copy, allowance)
    allowance.report_position()


def _copy(member: zipfile.ZipInfo, packed: zipfile.ZipFile, copy: BinaryIO, allowance: Allowance) -> None:
    """Write the content; zipfile never returns more of it than `file_size`, which was counted."""
    size = PIECE if member.compress_type in _BOUNDED_METHODS else _SMALL_PIECE
    left = member.file_size
    with packed.open(member) as source:
        while data := source.read(size):
            copy.write(data)
            left -= len(data)
            allowance.count_written(len(data))
    if left:
        raise zipfile.BadZipFile(f"the size of {excerpt(member.filename)} is not what the archive says")
