"""Where captured lines go: files of a directory that take turns, or objects on S3.

Every method may block, and raises OSError if lines cannot be kept.
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


class Destination(Protocol):
    """Keeps lines."""

    def write(self, lines: bytes) -> None:
        """Keep some whole lines, perhaps not before `flush`."""

    def flush(self, now: bool) -> None:
        """Keep what waits if it is time for that, or `now`."""


def destination(settings: CaptureSettings) -> Destination:
    """Return what `capture_to` names. Raises ConfigurationError if it cannot be used."""
    place = settings.capture_to or ""
    if place.startswith("s3://"):
        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        if not bucket:
            raise ConfigurationError(f'capture_to = "{place}" names no bucket; allowed: s3://bucket/prefix')
        return S3Objects(_s3_client(), bucket, prefix, min(settings.capture_file_size, _OBJECT_BYTES))
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

    def write(self, lines: bytes) -> None:
        if self._file is None or self._written >= self._size:
            self._begin()
        assert self._file is not None
        left = memoryview(lines)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            os.ftruncate(self._file, self._written)  # the next line does not begin behind half of this one
            raise
        self._written += len(lines)

    def flush(self, now: bool) -> None:
        """Do nothing: every line is written at once."""

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
        self._begun = time.monotonic()
        self._number = 0

    def write(self, lines: bytes) -> None:
        if not self._lines:
            self._begun = time.monotonic()
        self._lines += lines
        if len(self._lines) >= self._size:
            self._send()

    def flush(self, now: bool) -> None:
        if self._lines and (now or time.monotonic() - self._begun >= _OBJECT_S):
            self._send()

    def _send(self) -> None:
        """Store what waits; it is dropped if that fails, so that it cannot grow without bounds."""
        self._number += 1
        hour = datetime.now(UTC).strftime("%Y/%m/%d/%H")
        key = "/".join(filter(None, (self._prefix, hour, _name(self._number))))
        lines, self._lines = bytes(self._lines), bytearray()
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._client.put_object(Bucket=self._bucket, Key=key, Body=lines)
        except (BotoCoreError, ClientError) as error:
            raise OSError(f"s3://{self._bucket}/{key}: {error}; {len(lines)} bytes are lost") from error


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
