"""The worker's way back: what one tick of the loop produced, for all requests together, leaves in one `Frames`."""

from __future__ import annotations

import asyncio
from typing import Protocol

from lmi_server.contract.protocol import Chunk, End, Error, Frames, Head, Item, Reply


class Way(Protocol):
    """What leads to the front end: the link itself, or where the main thread serves, what leads to the link."""

    @property
    def congested(self) -> bool:
        """True while the front end cannot keep up."""

    async def writable(self) -> None:
        """Wait until the front end has caught up."""

    def send(self, message: Frames) -> None:
        """Send `message`, at `flush` at the latest."""

    def flush(self) -> None:
        """Send everything now."""


class Outbox:
    """Collects items until the end of the tick."""

    def __init__(self, link: Way) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._items: list[Item] = []
        self._unsent: list[Answer] = []  # answers that hold chunks of this tick
        self._scheduled = False
        self._closed = False

    def add_last(self, answer: Answer, item: Item) -> None:
        """Add what `answer` still holds, then `item`."""
        answer.move_to(self._items)
        self._items.append(item)
        self._schedule()

    def add_later(self, answer: Answer) -> None:
        """Take the chunks of `answer` at the end of the tick, joined."""
        self._unsent.append(answer)
        self._schedule()

    async def breathe(self) -> None:
        """Give the other tasks of the loop their turn, and wait while the front end cannot keep up."""
        await asyncio.sleep(0)
        if self._link.congested:
            await self._link.writable()

    def close(self) -> None:
        """Send everything, and nothing more: what has no ending yet ends with the link."""
        self.flush()
        self._closed = True

    def flush(self) -> None:
        """Send everything now."""
        self._scheduled = False
        if self._closed:
            return
        unsent, self._unsent = self._unsent, []
        for answer in unsent:
            answer.move_to(self._items)
        if self._items:
            items, self._items = self._items, []
            self._link.send(Frames(items))
            self._link.flush()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)


class Answer:
    """The answer to one request on its way out; it ends exactly once, with `reply`, `end` or `error`.

    The head of a stream leaves with its first bytes, so an error before them still has a status of its own.
    """

    __slots__ = ("_chunks", "_head", "_outbox", "_prefix", "ended", "id", "progressed", "started")

    def __init__(self, outbox: Outbox, request_id: int) -> None:
        self.id = request_id
        self.started = False
        self.ended = False
        self.progressed = False  # set with each delta; cleared once the front end was told
        self._outbox = outbox
        self._head: Head | None = None
        self._prefix = b""
        self._chunks: list[bytes] = []

    def open(self, status: int, headers: list[tuple[str, str]], prefix: bytes) -> None:
        """Set what the stream begins with; it leaves before the first chunk."""
        self._head = Head(self.id, status, headers)
        self._prefix = prefix

    def chunk(self, data: bytes) -> None:
        """Add bytes (not empty) to the stream."""
        chunks = self._chunks
        if not chunks:
            self.started = True
            self._outbox.add_later(self)
        chunks.append(data)

    def reply(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
        self._finish(Reply(self.id, status, headers, data))

    def end(self, status: int = 200) -> None:
        """End the stream; `status` is that of the error which its last bytes tell of."""
        self.started = True
        self._finish(End(self.id, status))

    def error(self, kind: str, message: str) -> None:
        self._finish(Error(self.id, kind, message))

    def move_to(self, items: list[Item]) -> None:
        """Move what is held here to `items`."""
        if self._head is not None and self.started:
            items.append(self._head)
            self._head = None
            self._chunks.insert(0, self._prefix)
        chunks = self._chunks
        if chunks:
            items.append(Chunk(self.id, chunks[0] if len(chunks) == 1 else b"".join(chunks)))
            chunks.clear()

    def _finish(self, item: Reply | End | Error) -> None:
        assert not self.ended, f"request {self.id} ends twice"
        self.ended = True
        self._outbox.add_last(self, item)
