"""One accepted request: the job that the pool moves around, and the reply slot of its answer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lmi_server.contract.errors import DeadlineError, LmiServerError
from lmi_server.contract.protocol import Chunk, End, Error, Head, Input, Item, Reply

if TYPE_CHECKING:
    from lmi_server.supervisor.worker_requests import WorkerRequests


@dataclass(slots=True, eq=False)
class ReplySlot:
    """Where the answer to one request arrives. One reader: `await wait()`, then `take()`, until `terminal` is set.

    The slot keeps exactly one terminal item (Reply, End or Error) and drops everything that follows it. Once `head` is
    set, the client may have seen a part of the answer. While `is_held` is set, the worker waits for the reader. If
    `keeps_chunks` is set, `take` returns one chunk at a time. Times are those of time.monotonic(), 0.0 before the
    event.
    """

    head: Head | None = None
    terminal: Reply | End | Error | None = None
    first_byte_at: float = 0.0
    is_held: bool = False
    keeps_chunks: bool = False
    progressed_at: float = 0.0  # the last time at which the worker got the request or went on with it
    unread: int = 0  # bytes that `take` has not returned yet
    _chunks: deque[bytes] = field(default_factory=deque)
    _waiter: asyncio.Future[None] | None = None

    def put(self, item: Item, now: float) -> None:
        """Add an item that arrived at `now`."""
        if self.terminal is not None:
            return
        self.progressed_at = now
        if isinstance(item, Chunk):
            self._chunks.append(item.data)
            self.unread += len(item.data)
        elif isinstance(item, Head):
            self.head = item
            self.first_byte_at = now
        else:
            self.terminal = item
            if self.head is None:
                self.first_byte_at = now
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    @property
    def size(self) -> int:
        """Return how many bytes of the answer are kept here."""
        return self.unread + (len(self.terminal.data) if isinstance(self.terminal, Reply) else 0)

    async def wait(self) -> None:
        """Return once there is something new: a head, unread bytes, or the terminal item."""
        if self._chunks or self.terminal is not None:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def take(self) -> bytes:
        """Return the bytes that arrived since the last call, or the next chunk of them; `unread` says what is left."""
        chunks = self._chunks
        if self.keeps_chunks and len(chunks) > 1:
            data = chunks.popleft()
            self.unread -= len(data)
            return data
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self.unread = 0
        return data


class Deadline(NamedTuple):
    """When a request is not worth an answer any more, by time.monotonic().

    `text` says which header asked for how many seconds. A request that a worker has is ended if `ends_running` is set.
    """

    at: float
    text: str
    ends_running: bool


async def until_deadline(waiting: Awaitable[None], deadline: Deadline | None, what: str, remedy: str = "") -> None:
    """Await `waiting`, until the deadline at most. Raises DeadlineError, which says `what` the request has done."""
    try:
        async with asyncio.timeout(None if deadline is None else deadline.at - time.monotonic()) as limit:
            await waiting
    except TimeoutError:
        if deadline is None or not limit.expired():
            raise
        raise DeadlineError(
            f"The request {what} until its deadline ({deadline.text} seconds) had passed; allow more time, or"
            f" {remedy or 'send it again later'}"
        ) from None


@dataclass(slots=True, eq=False)
class Job:
    """One accepted request. `priority`: lower runs sooner. Times are those of time.monotonic(), 0.0 before the event.

    `on_overflow` is called if the answer is given up because its client reads too slowly. `fingerprint` identifies the
    request to the quarantine; None while that has no need of it. `tenant` identifies the API key it came with. `timer`
    runs until the deadline. `attempts` are the times at which workers got it and lost it again, `deaths` the number of
    workers that died over it. While `is_ahead` is set, a worker has the job, but no place for it. If `is_recalled`,
    that worker has been asked to give it back.
    """

    id: int
    request: Input
    on_overflow: Callable[[], None]
    deadline: Deadline | None = None
    tenant: bytes = b""
    reply: ReplySlot = field(default_factory=ReplySlot)
    timer: asyncio.TimerHandle | None = None
    priority: int = field(init=False)
    holder: WorkerRequests | None = None  # the requests of the worker that has it; None while it waits
    batch: int = 0  # the number of its batch in that worker
    is_ahead: bool = False
    is_recalled: bool = False
    may_go_ahead: bool = True  # until a worker dies that had it ahead: it may be what the worker died of
    deaths: int = 0
    attempts: tuple[tuple[float, float], ...] = ()
    cancelled: bool = False
    fingerprint: bytes | None = None
    queued_at: float = field(default_factory=time.monotonic)
    sent_at: float = 0.0  # when it got a place in a worker

    def __post_init__(self) -> None:
        self.priority = self.request.priority

    def start(self, holder: WorkerRequests, batch: int, now: float) -> None:
        """Record that a worker gets the job at `now`, in its batch of that number."""
        self.holder = holder
        self.batch = batch
        self.sent_at = self.reply.progressed_at = now

    def go_ahead(self, holder: WorkerRequests) -> None:
        """Record that a worker gets the job before it has a place for it."""
        self.holder = holder
        self.is_ahead = True
        self.is_recalled = False

    def begin(self, now: float) -> None:
        """Record that the worker has a place for the job at `now`."""
        self.is_ahead = False
        self.sent_at = self.reply.progressed_at = now

    def come_back(self) -> None:
        """Record that the job waits in the queue again."""
        self.holder = None
        self.is_ahead = False

    def release(self) -> None:
        """Let the worker go on with an answer whose reader has caught up."""
        self.reply.is_held = False
        if self.holder is not None and self.reply.terminal is None:
            self.holder.hold(self, held=False)

    def fail(self, error: LmiServerError) -> None:
        """End the answer with `error`, unless it has ended."""
        failure = Error(self.id, error.kind, error.message, retry_after=error.retry_after)
        self.reply.put(failure, time.monotonic())
