"""How long the event loop of a server is busy at a time: its processor time between two turns, which is no other's."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvloop
from waiting import wait_until

VARIABLE = "TEST_LOOP_METER"
"""The variable of a server that names the file of its meter."""

_TURN_S = 0.001
_NANOSECONDS = 10**9
_ASKED, _ANSWERED, _ANSWER = slice(8), slice(8, 16), slice(16, 24)  # each has one writer


class LoopMeter:
    """A page that two processes share: the one asks by a number, and the loop of the other answers with that number."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_ANSWER.stop))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _ANSWER.stop)

    def take(self) -> float:
        """Return for how many seconds the loop was busy at a time, at most, since this was called last."""
        number = self._page[_ASKED] = (int.from_bytes(self._page[_ASKED]) + 1).to_bytes(8)
        wait_until(lambda: self._page[_ANSWERED] == number, "the loop turns")
        return int.from_bytes(self._page[_ANSWER]) / _NANOSECONDS

    async def run(self) -> None:
        """Measure this loop, for ever."""
        longest, before = 0, time.thread_time_ns()
        while True:
            await asyncio.sleep(_TURN_S)
            now = time.thread_time_ns()
            longest, before = max(longest, now - before), now
            number = self._page[_ASKED]
            if number != self._page[_ANSWERED]:
                self._page[_ANSWER] = longest.to_bytes(8)
                self._page[_ANSWERED] = number
                longest = 0


@contextlib.contextmanager
def metered_loops(path: Path) -> Iterator[None]:
    """Have each loop that uvloop runs be metered in the file `path`."""
    meter, run = LoopMeter(path), uvloop.run

    async def metered(main: Coroutine[Any, Any, Any]) -> Any:
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
