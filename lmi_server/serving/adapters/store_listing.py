"""The names of the adapters in a store, for lists of models."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from lmi_server.artifacts.fetch import ArtifactSettings, list_folders
from lmi_server.artifacts.location import BUCKETS
from lmi_server.contract.errors import ArtifactError
from lmi_server.serving.adapters.adapter_store import is_adapter_name

logger = logging.getLogger(__name__)

_MAX = 1000
_KEPT_S = 30.0  # a list of models is asked for often, and a store on S3 is far
_WAIT_S = 5.0


class StoreListing:
    """Up to a thousand names, as they were some seconds ago. `store` is a directory or s3://bucket/prefix."""

    def __init__(self, store: str, model_dir: str, settings: ArtifactSettings) -> None:
        self._store = store
        self._model_dir = model_dir
        self._settings = settings
        self._names: Sequence[str] = ()
        self._listed_at = -_KEPT_S
        self._listing: asyncio.Task[None] | None = None

    async def names(self) -> Sequence[str]:
        """Return the names. A store that answers late is not waited for: the names before count then."""
        if self._listing is None and time.monotonic() - self._listed_at >= _KEPT_S:
            self._listing = asyncio.create_task(self._list())
        if self._listing is not None:
            await asyncio.wait([self._listing], timeout=_WAIT_S)
        return self._names

    async def _list(self) -> None:
        try:
            self._names = await self._list_store()
        except (ArtifactError, OSError) as error:
            logger.warning("the adapters in %s cannot be listed: %s", self._store, error)
        finally:
            self._listed_at = time.monotonic()
            self._listing = None

    async def _list_store(self) -> Sequence[str]:
        if self._store.startswith(BUCKETS):
            found = await list_folders(self._store, self._settings)
            return sorted(islice(filter(is_adapter_name, found), _MAX))
        return await asyncio.to_thread(lambda: sorted(islice(_folders(Path(self._model_dir, self._store)), _MAX)))


def _folders(directory: Path) -> Iterator[str]:
    with os.scandir(directory) as entries:
        yield from (entry.name for entry in entries if is_adapter_name(entry.name) and entry.is_dir())
