"""The way back from a worker to the front end: one buffer for the answers to all requests.

A step of an engine produces a token for each running request. Sent one by one they would cost a system call and a
wake-up of the front end each, so the buffer collects what one turn of the event loop produces and sends it as one
`Frames`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import types
from collections import deque
from collections.abc import Callable, Iterator

from lmi_server.contract.errors import HandlerError, LmiServerError, describe
from lmi_server.contract.link import FrontendLink
from lmi_server.contract.protocol import (
    CANCELLED,
    RECALLED,
    Begun,
    Chunk,
    End,
    Error,
    Frame,
    Frames,
    Head,
    Reply,
    Submit,
)
from lmi_server.dialects.errors import error_reply
from lmi_server.worker.answers.tally import GenerationTally

logger = logging.getLogger(__name__)

_UNSENT_LIMIT = 1 << 20  # bytes of streams that a handler may be ahead of the link
_POLL_S = 0.001
# What an encoder raises for values of a handler's own: an object, an integer of 100 bits, an endless list.
_UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError, MemoryError)
_TERMINAL = (Reply, End, Error)
_HELD_PAUSE_S = 0.01  # of a stream whose client reads slowly


class FrameBuffer:
    """Collects what requests produce until the next turn of the link's event loop.

    `writers` is the table of the requests that have not ended, by id. Answers come from the loop of the link, or from
    one other thread; the table, `flush` and `close` belong to the link's thread.
    """

    def __init__(self, link: FrontendLink, from_other_thread: bool = False) -> None:
        """Create it in the running event loop, the one of `link`."""
        loop = asyncio.get_running_loop()
        self._link = link
        # Waking a loop from another thread takes a system call, which the loop's own thread can do without.
        self._wake = loop.call_soon_threadsafe if from_other_thread else loop.call_soon
        self._drained = _poll if from_other_thread else link.writable  # an asyncio.Event belongs to one loop
        self.writers: dict[int, ResponseWriter] = {}
        self._idle = asyncio.Event()
        self._entries: deque[ResponseWriter | Reply | End | Error | Begun] = deque()
        self._scheduled = False
        self._closed = False
        self._sealed = False
        self._broken: set[int] = set()  # requests that have ended with an error of `_send_alone`, and do not know it
        # Bytes since the start. Each counter has one writing thread, so that the difference needs no lock.
        self._ahead = 0
        self._flushed = 0

    def new_writer(self, submit: Submit) -> ResponseWriter:
        """Return what writes the answer to `submit`; it is in the table until the answer has ended."""
        writer = self.writers[submit.id] = ResponseWriter(self, submit)
        return writer

    async def wait_idle(self) -> None:
        """Wait until no request is left."""
        if self.writers:
            self._idle.clear()
            await self._idle.wait()

    def take_progressed(self) -> list[int]:
        """Return the requests that moved since the last call without the front end seeing it."""
        moved = [writer for writer in self.writers.values() if writer.progressed]
        for writer in moved:
            writer.progressed = False
        return [writer.id for writer in moved]

    def add(self, entry: ResponseWriter | Reply | End | Error | Begun) -> None:
        """Send an item, or what a writer holds, with the next flush."""
        if self._sealed:
            return
        # Append first, then look at the flag; `flush` clears the flag first, then takes entries. In whatever order the
        # threads run, either this flush takes the entry or a further one is scheduled.
        self._entries.append(entry)
        if not self._scheduled:
            self._scheduled = True
            self._wake(self.flush)

    def count(self, size: int) -> None:
        """Count bytes of a producer that does not leave its thread to others: it may run far ahead of the flush."""
        self._ahead += size

    @property
    def is_full(self) -> bool:
        """True while streams produce faster than the front end reads."""
        return self._ahead - self._flushed > _UNSENT_LIMIT or self._link.congested

    async def yield_and_drain(self) -> None:
        """Give other tasks of the running loop their turn, then wait until the front end has caught up."""
        await _turn()
        while self._link.congested:
            await self._drained()

    def flush(self) -> None:
        """Send everything now."""
        self._scheduled = False
        items: list[Frame] = []
        take = self._entries.popleft
        while self._entries:
            entry = take()
            if isinstance(entry, ResponseWriter):
                self._flushed += entry.move_to(items)
            else:
                items.append(entry)
                if not isinstance(entry, Begun):
                    self.writers.pop(entry.id, None)
        if items and not self._closed:
            self._send(items)
        if not self.writers:
            self._idle.set()

    def _send(self, items: list[Frame]) -> None:
        """Send the items. A request whose item cannot be encoded fails; the others of this flush do not."""
        if self._broken:
            items = self._without_broken(items)
        try:
            self._link.send_now(Frames(items))
        except _UNSENDABLE:
            for item in items:
                self._send_alone(item)

    def _send_alone(self, item: Frame) -> None:
        if item.id in self._broken:
            self._without_broken([item])
            return
        try:
            self._link.send_now(Frames([item]))
        except _UNSENDABLE as error:
            logger.exception("the answer to a request cannot be sent")
            failure = HandlerError(f"the answer of the handler cannot be sent: {describe(error)}")
            self._link.send_now(Frames([Error(item.id, failure.kind, failure.message)]))
            if not isinstance(item, _TERMINAL):
                self._broken.add(item.id)

    def _without_broken(self, items: list[Frame]) -> list[Frame]:
        """Return the items of requests that have not failed here; each goes up to its own end."""
        kept = [item for item in items if item.id not in self._broken]
        self._broken -= {item.id for item in items if isinstance(item, _TERMINAL)}
        return kept

    def seal(self) -> None:
        """Drop later items, from the thread of the answers."""
        self._sealed = True

    def close(self) -> None:
        """Send everything, and drop what comes later. Requests without a terminal item end with the link."""
        self.flush()
        self._closed = True


@types.coroutine
def _turn() -> Iterator[None]:
    """Give other tasks their turn, as asyncio.sleep(0) does, which makes a further coroutine."""
    yield


async def _poll() -> None:
    """Wait a little for another thread, which has no cheap way to wake this loop."""
    await asyncio.sleep(_POLL_S)


class ResponseWriter:
    """Writes the answer to one request; it ends exactly once, with `reply`, `end`, `error` or `fail`.

    The head of a stream leaves with its first bytes, so that an error before them has a status of its own. What a
    stream produces between two flushes leaves as one chunk, unless the request keeps chunks. While `is_held` is set,
    its client does not keep up. Until `has_begun` is set, the request waits for a place of the engine, or for the
    batches before it. If `is_cancelled`, its client is gone; if `is_recalled`, the front end wants it back. What
    `tally` has counted leaves with the end of the answer. `format_error` returns the last bytes of a stream that an
    error ends; without it the front end formats the error.
    """

    __slots__ = (
        "_head",
        "_keeps_chunks",
        "_name",
        "_pieces",
        "_prefix",
        "_queued",
        "_route",
        "buffer",
        "ended",
        "format_error",
        "has_begun",
        "id",
        "is_cancelled",
        "is_held",
        "is_recalled",
        "progressed",
        "started",
        "tally",
    )

    def __init__(self, buffer: FrameBuffer, submit: Submit) -> None:
        """Write the answer to `submit` into `buffer`."""
        self.id = submit.id
        self.started = False
        self.ended = False
        self.has_begun = not submit.ahead
        self.is_cancelled = False
        self.is_held = False
        self.is_recalled = False
        self.progressed = False  # set when the handler yields something, until that is reported
        self.format_error: Callable[[LmiServerError], bytes] | None = None
        self.buffer = buffer
        self.tally = GenerationTally(time.monotonic())
        self._route = submit.input.route  # the form of errors depends on these two
        self._name = submit.input.request_id
        self._keeps_chunks = submit.input.keeps_chunks
        self._head: Head | None = None
        self._prefix = b""
        self._pieces: list[bytes] = []
        self._queued = False  # in the buffer, for the next flush

    async def wait_for_client(self) -> None:
        """Wait until the client has caught up."""
        while self.is_held:  # noqa: ASYNC110 - it is set in another thread, which has no cheap way to wake this loop
            await asyncio.sleep(_HELD_PAUSE_S)

    def begin(self) -> None:
        """Report that the request has a place, if it came ahead."""
        if not self.has_begun and not self.ended:
            self.has_begun = True
            self.tally = GenerationTally(time.monotonic())
            self.buffer.add(Begun(self.id))

    def open(self, status: int, headers: list[tuple[str, str]], prefix: bytes = b"", reason: str = "") -> None:
        """Set how a stream begins: its head, and bytes that precede the first chunk."""
        self._head = Head(self.id, status, headers, reason)
        self._prefix = prefix

    def chunk(self, data: bytes) -> None:
        """Add bytes (not empty) to the stream."""
        # The same order as in `FrameBuffer.add`, for the same reason.
        self._pieces.append(data)
        if not self._queued:
            self._queued = self.started = True
            self.buffer.add(self)

    def reply(
        self, status: int, headers: list[tuple[str, str]], data: bytes, reason: str = "", message: str = ""
    ) -> None:
        """End with a whole answer. `message` is the reported error's, if the server wrote it."""
        self._finish(Reply(self.id, status, headers, data, reason, message, self.tally.summary()))

    def end(self, status: int = 200, message: str = "") -> None:
        """End the stream. `status` and `message` are those of an error in its last bytes."""
        if not self.started and not self._prefix and self._head is not None:
            self.reply(self._head.status, self._head.headers, b"", self._head.reason)
            return
        if not self.started:
            self.started = True
            self.buffer.add(self)
        self._finish(End(self.id, status, message, self.tally.summary()))

    def error(self, kind: str, message: str, code: int | None = None) -> None:
        """End with an Error, which the front end formats."""
        self._finish(Error(self.id, kind, message, code))

    def drop(self) -> None:
        """End what the front end has cancelled or recalled, unless it has ended."""
        if not self.ended:
            kind = RECALLED if self.is_recalled else CANCELLED
            self.error(kind, f"{kind.lower()} by the front end")

    def fail(self, error: LmiServerError) -> None:
        """End with an answer of the error's status, or with the last event of a stream that has begun."""
        if not self.started:
            self.reply(*error_reply(self._route, error, request_id=self._name), message=error.message)
        elif self.format_error is None:
            self.error(error.kind, error.message, error.code if isinstance(error, HandlerError) else None)
        else:
            data = self.format_error(error)
            if data:
                self.chunk(data)
            self.end(error_reply(self._route, error)[0], error.message)

    def move_to(self, items: list[Frame]) -> int:
        """Move what the stream produced to `items`; return its bytes without the prefix. Called by the flush."""
        self._queued = False
        pieces = self._pieces
        # `chunk` may append meanwhile, in another thread; what comes after the count stays for the next flush.
        count = len(pieces)
        if self._keeps_chunks:
            return self._move_each(items, count)
        if count == 1:
            data = pieces.pop(0)
        else:
            data = b"".join(pieces[:count])
            del pieces[:count]
        moved = len(data)
        if self._head is not None:
            items.append(self._head)
            self._head = None
            data = self._prefix + data
        if data:
            items.append(Chunk(self.id, data))
        return moved

    def _move_each(self, items: list[Frame], count: int) -> int:
        """Move `count` pieces, each as a chunk of its own; return their bytes without the prefix."""
        if self._head is not None:
            items.append(self._head)
            self._head = None
            if self._prefix:
                items.append(Chunk(self.id, self._prefix))
        moved = self._pieces[:count]
        del self._pieces[:count]
        items += [Chunk(self.id, piece) for piece in moved]
        return sum(map(len, moved))

    def _finish(self, item: Reply | End | Error) -> None:
        assert not self.ended, f"request {self.id} ends twice"
        self.ended = True
        self.buffer.add(item)
