"""Objects as files. One is written beside its place, synchronized and renamed, so that no reader sees a part of it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO, cast

from frontend.storage.objects import Entry
from lmi_server.contract.errors import ConfigurationError
from lmi_server.files.journal import LOCK, FileJournal, remove_journal, synchronize

_TEMPORARY = ".tmp"
_ABANDONED_S = 86_400.0  # without a write, after which the file of an upload belongs to a process that has ended


class DirectoryObjects:
    """Keeps objects below `directory`, which several servers may share."""

    def __init__(self, directory: Path, setting: str) -> None:
        """Raise ConfigurationError, which names `setting`, if the directory cannot be used."""
        self._directory = directory
        self._temporary = directory / _TEMPORARY
        try:
            self._temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self._temporary, os.W_OK):
                raise PermissionError("it is not writable")
            self.remove_abandoned()
        except OSError as error:
            raise ConfigurationError(f'{setting} = "{directory}" cannot be used: {error}') from error

    def remove_abandoned(self) -> None:
        for entry in os.scandir(self._temporary):
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_mtime < time.time() - _ABANDONED_S:
                    os.unlink(entry.path)

    def put(self, key: str, data: bytes) -> None:
        with self.writer(key) as file:
            file.write(data)

    def get(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def read(self, key: str, offset: int, size: int) -> bytes:
        with self._path(key).open("rb") as file:
            return os.pread(file.fileno(), size, offset)

    @contextlib.contextmanager
    def writer(self, key: str) -> Iterator[BinaryIO]:
        path = self._path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=self._temporary, delete=False) as file:
            try:
                yield cast("BinaryIO", file)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
                synchronize(path.parent)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.name)
                raise

    def remove(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def entries(self, folder: str) -> list[Entry]:
        found = []
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._path(folder)):
                with contextlib.suppress(FileNotFoundError):  # removed since
                    if entry.is_file() and not entry.name.endswith(LOCK):
                        found.append(Entry(entry.name, entry.stat().st_size))
        return sorted(found)

    def folders(self) -> list[str]:
        return sorted(
            entry.name for entry in os.scandir(self._directory) if entry.is_dir() and entry.name != _TEMPORARY
        )

    def journal(self, key: str) -> FileJournal:
        return FileJournal(self._path(key))

    def remove_journal(self, key: str) -> None:
        remove_journal(self._path(key))

    def _path(self, key: str) -> Path:
        return self._directory / key
