"""Extracts untrusted archives: writes nothing outside the target, no devices, and refuses decompression bombs."""

from __future__ import annotations

import gzip
import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from lmi_server.artifacts.progress import Activity, in_words
from lmi_server.artifacts.store import file_errors
from lmi_server.contract.errors import ArtifactError

_DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, lzma.LZMAError, zlib.error),
    *(EOFError, NotImplementedError),
)
_HERE = PurePosixPath()
_PART = 4 << 20  # bytes that are written at a time
_SMALL = 1 << 30  # bytes; an archive that unpacks to less is no bomb, whatever its compression ratio


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """Limits of an archive: entries, bytes in all, and bytes per byte of the archive (checked above 1 GiB)."""

    entries: int = 100_000
    size: int = 1 << 40
    ratio: int = 100

    def largest(self, archive_size: int) -> int:
        """Return how many bytes an archive of `archive_size` bytes may unpack to."""
        return min(self.size, max(_SMALL, self.ratio * archive_size))


def extract_archive(archive: Path, target: Path, limits: ArchiveLimits, activity: Activity) -> None:
    """Extract `archive` (tar in any compression, or zip) into the directory `target`.

    Raises ArtifactError if an entry is unsafe, or if the archive is damaged or over the limits. The caller must then
    throw `target` away, which may hold a part of the files.
    """
    try:
        # The content alone does not tell: is_zipfile looks at the end, and a tar may end with a zip file.
        if archive.name.lower().endswith((".zip", ".mar")) and zipfile.is_zipfile(archive):
            _extract_zip(archive, target, limits, activity)
        else:
            _extract_tar(archive, target, limits, activity)
    except _DAMAGED as error:
        reason = str(error).partition("\n")[0].rstrip(":")  # further lines say what each decompressor found
        raise ArtifactError(f"{archive}: is damaged, or is no tar or zip archive: {reason}") from error


class _Allowance:
    """Counts entries and bytes of an archive, and raises ArtifactError above the limits."""

    def __init__(self, archive: Path, limits: ArchiveLimits, activity: Activity) -> None:
        self._archive = archive
        self._entries = limits.entries
        self._largest = limits.largest(archive.stat().st_size)
        self._activity = activity
        self._count = 0
        self._size = 0
        self._packed = archive.stat().st_size

    def take(self, size: int) -> None:
        """Count an entry of `size` bytes before it is written."""
        self._count += 1
        self._size += size
        if self._count > self._entries:
            raise ArtifactError(f"{self._archive}: holds more than {self._entries} entries; it is refused as a bomb")
        if self._size > self._largest:
            raise ArtifactError(
                f"{self._archive}: unpacks to more than {in_words(self._largest)}; it is refused as a bomb"
            )

    def read(self, position: int) -> None:
        """Report how much of the archive is unpacked: what its files take in all is known only at its end."""
        self._activity.report(f"extracting {self._archive.name}", min(position, self._packed), self._packed)


def _extract_tar(archive: Path, target: Path, limits: ArchiveLimits, activity: Activity) -> None:
    allowance = _Allowance(archive, limits, activity)
    guard = _TarGuard(archive)
    with archive.open("rb") as packed, tarfile.open(fileobj=packed) as tar:
        # Member by member, not with the list of all: the limits and the guard judge a member before it is written.
        for member in tar:
            allowance.take(member.size)
            allowance.read(packed.tell())
            guard.check(member)
            with file_errors(target):
                if member.issym() or member.islnk():
                    _write_link(member, target)
                else:
                    _write_tar_member(tar, member, target / member.name, lambda _: allowance.read(packed.tell()))
        allowance.read(archive.stat().st_size)


def _write_tar_member(
    tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path, on_written: Callable[[int], None]
) -> None:
    """Write a file or directory that the guard has checked.

    `tar.extract` would set owners and modes as the archive has them. Its filters, which prevent that, came with Python
    3.11.4, and Debian 12 has 3.11.2.
    """
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # an entry of the same name may be a hard link to another file
    source = tar.extractfile(member)
    assert source is not None  # the guard lets only files, links and directories through
    with source, path.open("wb") as copy:
        _copy(source, copy, on_written)
    path.chmod(member.mode & 0o755 | 0o600)


def _copy(source: IO[bytes], copy: IO[bytes], on_written: Callable[[int], None]) -> None:
    while part := source.read(_PART):
        copy.write(part)
        on_written(copy.tell())


def _write_link(member: tarfile.TarInfo, target: Path) -> None:
    """Make the link `member`, which the guard has checked.

    tarfile itself, if it cannot make a link, searches the archive for a copy of the target; on crafted links that
    search may not end.
    """
    path, linked = target / member.name, target / member.linkname
    if member.islnk() and path == linked:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if member.issym():
        path.symlink_to(member.linkname)
    else:
        path.hardlink_to(linked)


class _TarGuard:
    """Refuses paths out of the archive, paths that lead through a link, and special files.

    Two entries together may do what neither does alone: the first makes a link, the second writes through it. If no
    path leads through a link, then a path means what its text says, and checking the text of each entry is enough.
    """

    def __init__(self, archive: Path) -> None:
        self._archive = archive
        self._links: set[PurePosixPath] = set()
        self._files: set[PurePosixPath] = set()

    def check(self, member: tarfile.TarInfo) -> None:
        """Raise ArtifactError if `member` is unsafe after the members that were checked before it.

        Normalises its name, and that of the file that it links to: "./a" becomes "a".
        """
        path = _safe_path(self._archive, member.name)
        if path == _HERE and not member.isdir():
            raise _refused(self._archive, member.name, "has no name")
        member.name = str(path)
        if any(step in self._links for step in (path, *path.parents)):
            raise _refused(self._archive, member.name, "leads through a link")
        if member.issym():
            self._check_link(member, path)
            self._links.add(path)
        elif member.islnk():
            linked = _safe_path(self._archive, member.linkname)
            if linked not in self._files:
                reason = f"is a link to {member.linkname}, which is no file before it"
                raise _refused(self._archive, member.name, reason)
            member.linkname = str(linked)
            self._files.add(path)
        elif member.isreg():
            self._files.add(path)
        elif not member.isdir():
            raise _refused(self._archive, member.name, "is a device or another special file")

    def _check_link(self, member: tarfile.TarInfo, path: PurePosixPath) -> None:
        link = PurePosixPath(member.linkname)
        upwards = len([part for part in link.parts if part == ".."])
        # ".." may stand only at the beginning, and only as often as there are directories above the link.
        leads_out = link.is_absolute() or upwards > len(path.parts) - 1
        if leads_out or ".." in link.parts[upwards:]:
            raise _refused(self._archive, member.name, f"is a link out of the archive ({member.linkname})")


def _extract_zip(archive: Path, target: Path, limits: ArchiveLimits, activity: Activity) -> None:
    allowance = _Allowance(archive, limits, activity)
    reached = 0
    with zipfile.ZipFile(archive) as packed:
        for member in packed.infolist():
            # zipfile never unpacks more than file_size bytes of a member, so a header that lies does no harm.
            allowance.take(member.file_size)
            allowance.read(reached)
            path = _safe_path(archive, member.filename)
            kind = stat.S_IFMT(member.external_attr >> 16)  # the upper half is Unix's mode; 0 if made elsewhere
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refused(archive, member.filename, "is a link or a special file")
            if member.flag_bits & 1:
                raise _refused(archive, member.filename, "is encrypted")
            with file_errors(target):
                _write_zip_member(packed, member, target / path, _reporter(allowance, member, reached))
            reached += member.compress_size
    allowance.read(archive.stat().st_size)


def _reporter(allowance: _Allowance, member: zipfile.ZipInfo, reached: int) -> Callable[[int], None]:
    """Return what reports how much of a member is written; the archive is read up to `reached` before it."""
    return lambda written: allowance.read(reached + member.compress_size * written // max(1, member.file_size))


def _write_zip_member(
    packed: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path, on_written: Callable[[int], None]
) -> None:
    if member.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with packed.open(member) as source, path.open("wb") as copy:
        _copy(source, copy, on_written)


def _safe_path(archive: Path, name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute():
        raise _refused(archive, name, "is an absolute path")
    if ".." in path.parts:
        raise _refused(archive, name, "leads out of the archive")
    if "\\" in name or "\0" in name:
        raise _refused(archive, name, "holds a backslash or a null character, which no path in an archive may have")
    return path


def _refused(archive: Path, name: str, reason: str) -> ArtifactError:
    return ArtifactError(f"{archive}: entry {name!r} {reason}; the archive is refused")


def content_root(directory: Path) -> Path:
    """Return the only entry of `directory` if that is a directory; else `directory` itself."""
    with os.scandir(directory) as found:
        entries = list(found)
    if len(entries) == 1 and entries[0].is_dir(follow_symlinks=False):
        return directory / entries[0].name
    return directory


def visible_files(directory: Path) -> Iterator[Path]:
    """Yield the entries of `directory` without hidden ones."""
    return (path for path in directory.iterdir() if not path.name.startswith("."))
