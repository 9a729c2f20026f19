"""Where captured lines go: files of a directory that take turns, or objects on S3.

Every method may block, and raises LostError if lines cannot be kept.
"""

from __future__ import annotations

import contextlib
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from frontend.capture.settings import CaptureSettings
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
    if place.startswith("s3://"):
        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        if not bucket:
            raise ConfigurationError(f'capture_to = "{place}" names no bucket; allowed: s3://bucket/prefix')
        return S3Objects(_s3_client(), bucket, prefix, min(settings.capture_file_size, _OBJECT_BYTES))
    if "://" in place:
        raise ConfigurationError(f'capture_to = "{place}" is not allowed; allowed: a directory, or s3://bucket/prefix')
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
            if self._file is None or self._written >= self._size:
                self._begin()
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
        path = self._directory / _name(self._number)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._written = 0
        for old in sorted(self._directory.glob(f"{_PREFIX}*{_SUFFIX}"))[: -self._count]:
            with contextlib.suppress(FileNotFoundError):
                old.unlink()


class S3Objects:
    """Objects below prefix/yyyy/mm/dd/hh/, as SageMaker lays them out, of up to `size` bytes or one minute."""

    def __init__(self, client: Any, bucket: str, prefix: str, size: int) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix.strip("/")
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
        hour = datetime.now(UTC).strftime("%Y/%m/%d/%H")
        key = "/".join(filter(None, (self._prefix, hour, _name(self._number))))
        lines, self._lines = bytes(self._lines), bytearray()
        count, self._count = self._count, 0
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._client.put_object(Bucket=self._bucket, Key=key, Body=lines)
        except (BotoCoreError, ClientError) as error:
            raise LostError(count, f"s3://{self._bucket}/{key}: {error}; {len(lines)} bytes are lost") from error
        return count


def _name(number: int) -> str:
    """Return a name that sorts by time; no other process has it."""
    at = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    return f"{_PREFIX}{at}-{os.getpid()}-{number}{_SUFFIX}"


def _s3_client() -> Any:
    try:
        import boto3
    except ImportError as error:
        raise ConfigurationError(f'capture_to on S3 needs boto3 ({error}); pip install "lmi-server[s3]"') from error
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    try:
        return boto3.session.Session().client("s3", config=Config(connect_timeout=10, read_timeout=30))
    except BotoCoreError as error:
        raise ConfigurationError(f"capture_to: {error}; set it as for other tools of AWS") from error
