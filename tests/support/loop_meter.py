"""How long the event loop of a server is busy at a time: its processor time between two turns, which is no other's."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import struct
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvloop
from waiting import wait_until

VARIABLE = "TEST_LOOP_METER"
"""The variable of a server that names the file of its meter."""

_TURN_S = 0.001
_NUMBERS = struct.Struct("dq")  # the longest time, and how many turns there were


class LoopMeter:
    """The longest time that the loop was busy since `reset`, in a file that two processes share."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_NUMBERS.size))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _NUMBERS.size)

    @property
    def longest_s(self) -> float:
        """The longest time, in seconds."""
        return float(self._read()[0])

    def reset(self) -> None:
        self._write(0.0, self._read()[1])

    def wait(self) -> None:
        """Wait until the loop has turned again, so that what it did before is counted."""
        turns = self._read()[1]
        wait_until(lambda: self._read()[1] > turns + 1, "the loop turns")

    async def run(self) -> None:
        """Note how long this loop is busy at a time, for ever."""
        before = time.thread_time()
        while True:
            await asyncio.sleep(_TURN_S)
            now = time.thread_time()
            longest, turns = self._read()
            self._write(max(longest, now - before), turns + 1)
            before = now

    def _read(self) -> tuple[float, int]:
        longest, turns = _NUMBERS.unpack_from(self._page)
        return longest, turns

    def _write(self, longest: float, turns: int) -> None:
        _NUMBERS.pack_into(self._page, 0, longest, turns)


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
