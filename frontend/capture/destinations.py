"""Where captured lines go: files of a directory that take turns, or objects on S3.

Every method may block, and raises LostError if lines cannot be kept.
"""

from __future__ import annotations

import contextlib
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from frontend.capture.settings import CaptureSettings
from frontend.storage.objects import ObjectStore, open_store
from lmi_server.contract.errors import ConfigurationError

_PREFIX, _SUFFIX = "capture-", ".jsonl"
_OBJECT_BYTES = 8 << 20
_OBJECT_S = 60.0


class LostError(OSError):
    """So many lines are lost, because the place for them has failed."""

    def __init__(self, count: int, reason: str) -> None:
        super().__init__(reason)
        self.count = count


class Destination(Protocol):
    """Keeps lines, each of which is one exchange."""

    def write(self, line: bytes) -> int:
        """Keep a whole line, perhaps not before `flush`; return how many lines are kept with this call."""

    def flush(self, now: bool) -> int:
        """Keep what waits if it is time for that, or `now`; return how many lines are kept with this call."""


def destination(settings: CaptureSettings) -> Destination:
    """Return what `capture_to` names. Raises ConfigurationError if it cannot be used."""
    place = settings.capture_to or ""
    if "://" in place:
        return BucketObjects(open_store(place, "capture_to"), min(settings.capture_file_size, _OBJECT_BYTES))
    try:
        return RotatingFiles(Path(place), settings.capture_file_size, settings.capture_files)
    except OSError as error:
        raise ConfigurationError(f'capture_to = "{place}" cannot be used: {error}') from error


class RotatingFiles:
    """Files that only the user of the server may read, because prompts are in them; the newest `count` stay."""

    def __init__(self, directory: Path, size: int, count: int) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._size = size
        self._count = count
        self._file: int | None = None
        self._written = 0
        self._number = 0

    def write(self, line: bytes) -> int:
        try:
            if self._file is None or self._written >= self._size or not os.fstat(self._file).st_nlink:
                self._begin()  # also when someone has removed the file: its lines would be lost
            assert self._file is not None
            self._write_whole(self._file, line)
        except OSError as error:
            raise LostError(1, str(error)) from error
        self._written += len(line)
        return 1

    def _write_whole(self, file: int, line: bytes) -> None:
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(file, left) :]
        except OSError:
            os.ftruncate(file, self._written)  # the next line does not begin behind half of this one
            raise

    def flush(self, now: bool) -> int:
        """Do nothing: every line is written at once."""
        return 0

    def _begin(self) -> None:
        """Begin the next file, and remove the oldest ones."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._number += 1
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may be gone by now
        path = self._directory / _name(self._number)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._written = 0
        for old in sorted(self._directory.glob(f"{_PREFIX}*{_SUFFIX}"))[: -self._count]:
            with contextlib.suppress(OSError):  # one that cannot be removed keeps no other one
                old.unlink()


class BucketObjects:
    """Objects below yyyy/mm/dd/hh/, as SageMaker lays them out, of up to `size` bytes or one minute."""

    def __init__(self, store: ObjectStore, size: int) -> None:
        self._store = store
        self._size = size
        self._lines = bytearray()
        self._count = 0  # of the lines that wait
        self._begun = time.monotonic()
        self._number = 0

    def write(self, line: bytes) -> int:
        if not self._lines:
            self._begun = time.monotonic()
        self._lines += line
        self._count += 1
        return self._send() if len(self._lines) >= self._size else 0

    def flush(self, now: bool) -> int:
        if self._lines and (now or time.monotonic() - self._begun >= _OBJECT_S):
            return self._send()
        return 0

    def _send(self) -> int:
        """Store what waits; it is dropped if that fails, so that it cannot grow without bounds."""
        self._number += 1
        key = f"{datetime.now(UTC):%Y/%m/%d/%H}/{_name(self._number)}"
        lines, self._lines = bytes(self._lines), bytearray()
        count, self._count = self._count, 0
        try:
            self._store.put(key, lines)
        except OSError as error:
            raise LostError(count, f"{error}; {len(lines)} bytes are lost") from error
        return count


def _name(number: int) -> str:
    """Return a name that sorts by time; no other process has it."""
    at = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    return f"{_PREFIX}{at}-{os.getpid()}-{number}{_SUFFIX}"
