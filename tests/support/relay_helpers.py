"""What the tests of the relay share."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop
from paths import MODEL_CODE

HANDLERS = str(MODEL_CODE)
"""To be put on PYTHONPATH of a worker: where `fault_handlers` is."""

FAULTS = "fault_handlers:FaultHandler"


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test on uvloop, for at most a minute."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(60):
                await test(**fixtures)

        uvloop.run(limited())

    return run
