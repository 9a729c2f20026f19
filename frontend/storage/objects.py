"""What a store of objects is, and which one a setting names.

A key is a path of names that this server has made: letters, digits, `_`, `-` and `.`, with slashes between. No key
comes from a client unchecked.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple, Protocol, TypeVar

from pydantic import Field

from lmi_server.configuration.declaration import Allowed
from lmi_server.contract.errors import ConfigurationError, ServingError

StorePlace = Annotated[str | None, Field(min_length=1), Allowed("a directory, or s3://bucket/prefix")]

_S3 = re.compile(r"s3://([^/]+)/?(.*)")
logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Entry(NamedTuple):
    """One object of a folder: the last part of its key, and its bytes."""

    name: str
    size: int


class Journal(Protocol):
    """What one process appends to, and finds again after its sudden end. Every method may block; raises OSError.

    What `append` was given is there as a whole or not at all. TakenError says that another process has taken over.
    """

    def blocks(self) -> Iterator[bytes]:
        """Yield what was appended, in blocks of any size."""

    def append(self, data: bytes) -> None:
        """Add `data`; it outlives the machine's sudden end from the return on."""

    def keep(self) -> None:
        """Say that this process still lives, which some stores must hear every few seconds."""

    def close(self) -> None:
        """Let another process have it."""


class ObjectStore(Protocol):
    """Keeps bytes by key. Every method may block, and raises OSError if it fails."""

    def put(self, key: str, data: bytes) -> None:
        """Keep `data` in place of what there was; it outlives the machine's sudden end from the return on."""

    def get(self, key: str) -> bytes | None:
        """Return the whole object, None if there is none."""

    def read(self, key: str, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset` on, b"" at the end. Raises FileNotFoundError."""

    def writer(self, key: str) -> AbstractContextManager[BinaryIO]:
        """Open a file that becomes the object when the block ends without an error."""

    def remove(self, key: str) -> None:
        """Forget the object, if there is one."""

    def entries(self, folder: str) -> list[Entry]:
        """Return the objects right below a folder, sorted by name."""

    def folders(self) -> list[str]:
        """Return the names of the folders at the top."""

    def remove_abandoned(self) -> None:
        """Remove what writers have left whose process has ended."""

    def journal(self, key: str) -> Journal:
        """Return the journal of this key, for this process alone. Raises TakenError if another process has it."""

    def remove_journal(self, key: str) -> None:
        """Forget a journal that no process has."""


def open_store(place: str, setting: str) -> ObjectStore:
    """Return the store at `place`, the value of `setting`. Raises ConfigurationError if it cannot be used."""
    found = _S3.fullmatch(place)
    if found is not None:
        from frontend.storage.s3 import S3Objects

        return S3Objects(found[1], found[2].strip("/"), setting)
    if "://" in place:
        raise ConfigurationError(f'{setting} = "{place}" is not allowed; allowed: a directory, or s3://bucket/prefix')
    from frontend.storage.directory import DirectoryObjects

    return DirectoryObjects(Path(place), setting)


class StoreThreads:
    """Runs the blocking calls of one feature."""

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, name)

    async def run(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Return what a function of a store returns. Raises OSError."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def serve(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        """The same for a client's call. Raises ServingError if the store fails."""
        try:
            return await self.run(function, *arguments)
        except OSError as error:
            logger.error("the store cannot be used: %s", error)
            raise ServingError(f"the store cannot be used: {error.strerror or error}; try again later") from error
