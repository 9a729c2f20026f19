"""What tarfile and zipfile read archives through. They trust the sizes that an archive names; these classes do not."""

from __future__ import annotations

import re
import tarfile
import zipfile
from typing import BinaryIO

from lmi_server.artifacts.unpacking.limits import SMALL, Allowance
from lmi_server.contract.errors import ArtifactError

PIECE = 1 << 20  # bytes that are copied at once
HEADERS = 256 << 10  # bytes of all headers of an entry of a tar: names, extended headers, maps of sparse files
_DIRECTORY = 32 << 20  # bytes of the directory of a zip: 100,000 entries with names of some 250 bytes
_RECORD = b"PK\x01\x02"  # begins each entry of the directory of a zip
# No header needs a longer number; some expressions of tarfile take time that grows with its square.
_LONG_NUMBER = re.compile(rb"[0-9]{128}")


class ForwardStream:
    """A tar, decompressed, that is read once from the beginning to the end."""

    def __init__(self, source: BinaryIO, allowance: Allowance) -> None:
        self._source = source
        self._allowance = allowance
        self._at = 0
        self._left: int | None = HEADERS  # of the headers; None in the content of a file
        self.last_read = b""

    def expect_headers(self) -> None:
        """The next reads are those of the headers of one entry."""
        self._left = HEADERS

    def expect_data(self) -> None:
        """The next reads are those of the content of a file, whose size was counted."""
        self._left = None

    def tell(self) -> int:
        return self._at

    def read(self, size: int) -> bytes:
        if self._left is None:
            if not 0 <= size <= PIECE:
                raise tarfile.ReadError("the map of a sparse file is damaged")
            return self._read(size)
        return self._read_header(size)

    def seek(self, position: int) -> None:
        """Skip to a position. Raises ReadError if it lies behind: an entry would be read again and again."""
        if position < self._at:
            raise tarfile.ReadError("an entry begins within the one before it")
        while self._at < position and self._read(min(PIECE, position - self._at)):
            pass

    def _read_header(self, size: int) -> bytes:
        assert self._left is not None
        if not 0 <= size <= self._left:
            raise ArtifactError(f"has headers of more than {HEADERS >> 10} KiB for one entry; the archive is refused")
        self._left -= size
        self.last_read = self._read(size)
        if _LONG_NUMBER.search(self.last_read):
            raise ArtifactError("has a header with a number of more than 127 digits; the archive is refused")
        return self.last_read

    def _read(self, size: int) -> bytes:
        data = self._source.read(size)
        self._at += len(data)
        if self._at > self._allowance.largest + SMALL:  # what is skipped is decompressed too
            raise self._allowance.too_large()
        return data


class DirectoryBound:
    """A zip file; until `opened` is set, what is read must be its directory."""

    def __init__(self, source: BinaryIO, allowance: Allowance) -> None:
        self._source = source
        self._allowance = allowance
        self.opened = False

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._source.tell()

    def seek(self, position: int, whence: int = 0) -> int:
        if whence == 0 and position < 0:
            raise zipfile.BadZipFile("an entry begins before the archive")
        return self._source.seek(position, whence)

    def read(self, size: int = -1) -> bytes:
        if self.opened:
            return self._source.read(size)
        if size > _DIRECTORY:
            raise ArtifactError(f"has a directory of more than {_DIRECTORY >> 20} MiB; the archive is refused")
        data = self._source.read(_DIRECTORY if size < 0 else size)
        if data.count(_RECORD) > self._allowance.entries:
            raise self._allowance.too_many()
        return data
