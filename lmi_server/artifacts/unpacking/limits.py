"""How much one archive may hold and cost, and the count of what it has cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lmi_server.contract.errors import ArtifactError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.sizes import in_words

SMALL = 1 << 30  # bytes; an archive that unpacks to less is no bomb, whatever its compression ratio
_BYTES_PER_SECOND = 8 << 20  # of processor time: less than what any of the decompressors does

_REPORT_EVERY = 4 << 20  # bytes that are written


class ArchiveLimits(NamedTuple):
    """Limits of an archive: entries, bytes in all, and bytes per byte of the archive (checked above 1 GiB).

    To unpack it may take `memory` bytes and `seconds` of processor time, and one more for each 8 MiB of its largest
    size.
    """

    entries: int = 100_000
    size: int = 1 << 40
    ratio: int = 100
    memory: int = 256 << 20
    seconds: int = 60

    def largest(self, archive_size: int) -> int:
        """Return how many bytes an archive of `archive_size` bytes may unpack to."""
        return min(self.size, max(SMALL, self.ratio * archive_size))

    def processor_seconds(self, archive_size: int) -> int:
        """Return how much processor time an archive of `archive_size` bytes may take."""
        return self.seconds + self.largest(archive_size) // _BYTES_PER_SECOND


class UnsafeEntryError(Exception):
    """What is wrong with one entry of an archive: the part of a sentence that follows its name."""


class BombError(ArtifactError):
    """An archive holds more than its limits allow."""


def entry_error(name: str, error: UnsafeEntryError) -> ArtifactError:
    """Return the error of the archive whose entry `name` is unsafe."""
    return ArtifactError(f"entry '{excerpt(name)}' {error}; the archive is refused")


class Allowance:
    """Counts entries and bytes, reports how far it is in the archive, and raises BombError above the limits.

    `position` returns the place in the archive that was read last; the reader of its format sets it.
    """

    def __init__(self, limits: ArchiveLimits, archive_size: int, report: Callable[[int], None]) -> None:
        self.entries = limits.entries
        self.largest = limits.largest(archive_size)
        self._report = report
        self._count = 0
        self._size = 0
        self._written = 0
        self._reported = 0
        self.position: Callable[[], int] = lambda: 0

    def take(self, size: int = 0) -> None:
        """Count an entry of `size` bytes, before it is written."""
        self._count += 1
        self._size += size
        if self._count > self.entries:
            raise self.too_many()
        if self._size > self.largest:
            raise self.too_large()

    def count_written(self, size: int) -> None:
        """Count bytes that are written; report them now and then, so that a large file shows progress."""
        self._written += size
        if self._written - self._reported >= _REPORT_EVERY:
            self.report_position()

    def report_position(self) -> None:
        self._reported = self._written
        self._report(self.position())

    def too_many(self) -> BombError:
        return BombError(f"holds more than {self.entries} entries; it is refused as a bomb")

    def too_large(self) -> BombError:
        return BombError(f"unpacks to more than {in_words(self.largest)}; it is refused as a bomb")
