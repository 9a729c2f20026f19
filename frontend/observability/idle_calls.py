"""Work that can wait until the event loop has nothing else to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_PASS_S = 20e-6  # a pass of the loop that does nothing else takes some microseconds
_LIMIT_S = 0.005


def call_when_idle(callback: Callable[[], None]) -> None:
    """Call back once a pass of the running event loop has nothing else to do; after 5 ms at the latest.

    Neither asyncio nor uvloop has such calls. A loop that comes back to its next call at once has had nothing to read,
    and no other call to make.
    """
    _IdleCall(callback).begin()


class _IdleCall:
    """One such call. A function within a function, which refers to itself, would be left to the garbage collector."""

    __slots__ = ("_callback", "_left", "_limit", "_loop")

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._limit = time.monotonic() + _LIMIT_S
        self._left = 0.0  # the first look comes before the loop has looked for what there is to read

    def begin(self) -> None:
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._left < _PASS_S or now > self._limit:
            self._callback()
        else:
            self._left = time.monotonic()
            self._loop.call_soon(self._look)
