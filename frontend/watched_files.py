"""Files of the settings that are read again when they change, so that a new certificate or key needs no restart."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

_CHECK_S = 2.0


class WatchedFiles:
    """Files as they are now. Make this before you read them, so that no change is missed."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._seen = self._state()

    async def changed(self) -> None:
        """Return once a file is another one than at the last call, or has other contents."""
        state = self._seen
        while state == self._seen:
            await asyncio.sleep(_CHECK_S)
            state = self._state()
        self._seen = state

    def _state(self) -> list[tuple[int, int, int] | None]:
        return [_state_of(name) for name in self._names]


def _state_of(name: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
