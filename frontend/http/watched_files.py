"""Files of the settings that are read again after a change: a new certificate or key needs no restart."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lmi_server.files.file_state import FileState, file_state

_CHECK_S = 2.0


class WatchedFiles:
    """Files as they are now. Make this before you read them, so that no change is missed."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._seen = self._state()

    async def wait_for_change(self) -> None:
        """Wait until a watched file was replaced or changed."""
        state = self._seen
        while state == self._seen:
            await asyncio.sleep(_CHECK_S)
            state = self._state()
        self._seen = state

    def _state(self) -> list[FileState]:
        return [file_state(name) for name in self._names]
