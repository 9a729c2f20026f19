"""What became of loading a model again beside itself, and whether its configuration has changed since."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from lmi_server.artifacts.location import RAY_MODEL_FILE
from lmi_server.configuration.choice.model_layers import SERVING_PROPERTIES
from lmi_server.contract.errors import LmiServerError
from lmi_server.files.file_state import FileState, file_state
from lmi_server.serving.pool.load_reports import LoadStatus


class ReloadStatus(Enum):
    """The words of the management API."""

    LOADING = "LOADING"
    DONE = "DONE"
    FAILED = "FAILED"


class Reload:
    """One attempt to load a model again; until it is `DONE`, requests go to the workers that there were.

    `began_at` is a time.time(). `failure` says why the model serves on as before. `loading` returns how far it is, None
    if nothing loads at the moment.
    """

    def __init__(self, loading: Callable[[], LoadStatus | None]) -> None:
        self.began_at = time.time()
        self.loading = loading
        self.failure: LmiServerError | None = None
        self._ended = asyncio.Event()

    @property
    def status(self) -> ReloadStatus:
        if not self._ended.is_set():
            return ReloadStatus.LOADING
        return ReloadStatus.DONE if self.failure is None else ReloadStatus.FAILED

    def end(self, failure: LmiServerError | None = None) -> None:
        """Say how it ended, and wake who waits for it."""
        self.failure, self.loading = failure, lambda: None
        self._ended.set()

    async def wait(self) -> None:
        """Return once it has ended."""
        await self._ended.wait()


def configuration_state(directory: Path) -> FileState:
    """Return the state of the file with the configuration of a model directory, None if it has none."""
    states = (file_state(directory / name) for name in (SERVING_PROPERTIES, RAY_MODEL_FILE))
    return next((state for state in states if state is not None), None)
