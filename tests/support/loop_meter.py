"""How long the event loop of a server is kept busy: processor time of its thread between two turns of the loop.

That is the time of this loop and of nothing else on the machine. If another thread holds the interpreter, that shows in
how long /ping takes, and in the processor time of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from waiting import wait_until

VARIABLE = "TEST_LOOP_METER"
"""The variable of a server that names the file of its meter."""

_TURN_S = 0.001
_NANOSECONDS = 10**9
_ASKED, _ANSWERED, _BUSY, _SPENT = (slice(at, at + 8) for at in range(0, 32, 8))  # each has one writer
_SIZE = 32


class Reading(NamedTuple):
    """Seconds: the longest time between two turns, and the processor time that the process has spent in all."""

    busy_s: float
    spent_s: float


class LoopMeter:
    """A page that two processes share: the one asks by a number, and the loop of the other answers with that number."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _SIZE)

    def take(self) -> Reading:
        """Return what was measured since this was called last."""
        number = self._page[_ASKED] = (int.from_bytes(self._page[_ASKED]) + 1).to_bytes(8)
        wait_until(lambda: self._page[_ANSWERED] == number, "the loop turns", first_pause_s=_TURN_S)
        busy, spent = (int.from_bytes(self._page[place]) / _NANOSECONDS for place in (_BUSY, _SPENT))
        return Reading(busy, spent)

    async def run(self) -> None:
        """Measure this loop, for ever."""
        longest, before = 0, time.thread_time_ns()
        began = time.process_time_ns()
        while True:
            await asyncio.sleep(_TURN_S)
            now = time.thread_time_ns()
            longest, before = max(longest, now - before), now
            number = self._page[_ASKED]
            if number != self._page[_ANSWERED]:
                spent = time.process_time_ns()
                self._page[_BUSY], self._page[_SPENT] = longest.to_bytes(8), (spent - began).to_bytes(8)
                self._page[_ANSWERED] = number
                longest, began = 0, spent


@contextlib.contextmanager
def metered_loops(path: Path) -> Iterator[None]:
    """Have each loop that uvloop runs in this process be metered in the file `path`. Workers are forks of it."""
    meter, run, process = LoopMeter(path), uvloop.run, os.getpid()

    async def metered(main: Coroutine[Any, Any, Any]) -> Any:
        if os.getpid() != process:
            return await main
        task = asyncio.create_task(meter.run())
        try:
            return await main
        finally:
            task.cancel()

    uvloop.run = lambda main, **options: run(metered(main), **options)  # type: ignore[assignment]
    try:
        yield
    finally:
        uvloop.run = run
