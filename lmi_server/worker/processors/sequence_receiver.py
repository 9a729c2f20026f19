"""Turns the deltas of one sequence into the bytes of its answer, as they come."""

from __future__ import annotations

import time
from collections.abc import Callable

from lmi_server.contract.errors import HandlerError
from lmi_server.contract.generation import Delta
from lmi_server.dialects.base import Exchange
from lmi_server.worker.answers.frame_buffer import ResponseWriter


class SequenceReceiver:
    """Takes the deltas of the sequence `index` of `exchange`; `emit` gets the bytes that a stream sends for them."""

    def __init__(self, exchange: Exchange, index: int, writer: ResponseWriter, emit: Callable[[bytes], None]) -> None:
        self._add = exchange.add
        self._index = index
        self._writer = writer
        self._emit = emit
        self._last: Delta | None = None
        self._first_at = self._last_at = 0.0

    def take(self, delta: Delta) -> bool:
        writer = self._writer
        writer.progressed = True
        if data := self._add(self._index, delta):
            self._emit(data)
        if delta.finish_reason is not None:
            self._last, self._last_at = delta, time.monotonic()
        if not self._first_at:
            self._first_at = time.monotonic()
        return not writer.is_held

    async def ready(self) -> None:
        if self._writer.is_held:
            await self._writer.wait_for_client()
        await self._writer.buffer.yield_and_drain()

    def count(self, adapter: str) -> None:
        """Count the sequence, which has ended. Raises HandlerError if it has no finish reason."""
        last = self._last
        if last is None or last.finish_reason is None:
            raise HandlerError("the handler ended a sequence without a finish reason")
        self._writer.tally.count(last.finish_reason, last.usage, self._first_at, self._last_at, adapter)
