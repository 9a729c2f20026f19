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
    loop = asyncio.get_running_loop()
    clock = time.monotonic
    limit = clock() + _LIMIT_S
    left = 0.0  # the first look comes before the loop has looked for what there is to read

    def look() -> None:
        nonlocal left
        now = clock()
        if now - left < _PASS_S or now > limit:
            callback()
        else:
            left = clock()
            loop.call_soon(look)

    loop.call_soon(look)
