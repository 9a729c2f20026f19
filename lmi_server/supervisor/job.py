"""One accepted request: the job that the pool moves around, and the reply slot that its answer arrives in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmi_server.contract.protocol import Chunk, End, Error, Head, Input, Item, Reply

if TYPE_CHECKING:
    from lmi_server.supervisor.worker_process import WorkerProcess


class ReplySlot:
    """Where the answer to one request arrives. One reader: `await wait()`, then `take()`, until `terminal` is set.

    Exactly one terminal item (Reply, End or Error) is kept; whatever follows it is dropped.
    """

    __slots__ = ("_chunks", "_waiter", "first_byte_at", "head", "progressed", "terminal", "unread")

    def __init__(self) -> None:
        self.head: Head | None = None
        self.terminal: Reply | End | Error | None = None
        self.first_byte_at = 0.0  # time.monotonic()
        self.unread = 0  # bytes that `take` has not returned yet
        self.progressed = False  # set by each item; whoever watches for progress clears it
        self._chunks: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def started(self) -> bool:
        """True once something may have been sent to the client."""
        return self.head is not None

    def put(self, item: Item) -> None:
        """Add what the worker sent."""
        if self.terminal is not None:
            return
        self.progressed = True
        if isinstance(item, Chunk):
            self._chunks.append(item.data)
            self.unread += len(item.data)
        elif isinstance(item, Head):
            self.head = item
            self.first_byte_at = time.monotonic()
        else:
            self.terminal = item
            if self.head is None:
                self.first_byte_at = time.monotonic()
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Return once there is something new: a head, unread bytes, or the terminal item."""
        if self._chunks or self.terminal is not None:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def take(self) -> bytes:
        """Return the bytes that arrived since the last call."""
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self.unread = 0
        return data


_WHERE = ("worker", "batch", "retried", "cancelled")
_TIMES = ("queued_at", "started_at", "quiet_since")


class Job:
    """One accepted request. `priority`: lower runs sooner. Times are those of time.monotonic()."""

    __slots__ = ("id", "request", "priority", "reply", "on_overflow", *_WHERE, *_TIMES)

    def __init__(self, job_id: int, request: Input, priority: int, on_overflow: Callable[[], None]) -> None:
        self.id = job_id
        self.request = request
        self.priority = priority
        self.reply = ReplySlot()
        self.worker: WorkerProcess | None = None  # the one that holds it; None while it waits
        self.batch = 0  # number of its batch in that worker
        self.retried = False
        self.cancelled = False
        self.on_overflow = on_overflow
        self.queued_at = time.monotonic()
        self.started_at = 0.0  # when a worker got it
        self.quiet_since = 0.0  # when it was last seen to make progress in that worker

    def start(self, worker: WorkerProcess, batch: int) -> None:
        """Note that `worker` gets the job now, in a batch of that number."""
        self.worker = worker
        self.batch = batch
        self.started_at = self.quiet_since = time.monotonic()

    @property
    def request_id(self) -> str:
        return self.request.properties.get("x-request-id", str(self.id))
