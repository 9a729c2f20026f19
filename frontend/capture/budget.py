"""The memory that captured exchanges may take together."""

from __future__ import annotations

import threading


class Budget:
    """Counts bytes up to `limit`, in any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, count: int) -> bool:
        """Count so many bytes more; return False, and count nothing, if there is no room."""
        with self._lock:
            if self._taken + count > self._limit:
                return False
            self._taken += count
            return True

    def give_back(self, count: int) -> None:
        with self._lock:
            self._taken -= count

    @property
    def taken(self) -> int:
        return self._taken
