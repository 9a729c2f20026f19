"""The way back from the main thread: what it produced, handed to the link's thread with one wake-up for many items."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.protocol import Chunk, End, Error, Input, Item, Reply
from lmi_server.dialects.errors import error_reply

_UNSENT_LIMIT = 1 << 20  # bytes of streams that the main thread may be ahead of the link


class Call:
    """One request. `cancelled` is set by the link's thread, the rest by the main thread."""

    __slots__ = ("cancelled", "ended", "id", "request", "started")

    def __init__(self, call_id: int, request: Input) -> None:
        self.id = call_id
        self.request = request
        self.cancelled = False
        self.started = False  # the head of its stream is out
        self.ended = False


class Outgoing:
    """What the main thread hands to the link's thread; all but `leave` is for the main thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_items: Callable[[list[Item]], None],
        is_congested: Callable[[], bool],
    ) -> None:
        self.loop = loop
        self._on_items = on_items
        self._is_congested = is_congested
        self._items: deque[Item] = deque()
        self._leaving = False  # `leave` is on its way to the loop
        self._put = 0  # bytes of chunks, ever; one thread writes each of the two
        self._left = 0

    def put(self, item: Item) -> None:
        """Send `item`, together with what else is put before the link's thread has its turn."""
        self._items.append(item)
        if not self._leaving:
            self._leaving = True
            self.loop.call_soon_threadsafe(self.leave)

    def put_chunk(self, call_id: int, data: bytes) -> None:
        self._put += len(data)
        self.put(Chunk(call_id, data))

    def end(self, call: Call, item: Reply | End | Error) -> None:
        """Send the last item of `call`."""
        call.ended = True
        self.put(item)

    def fail(self, call: Call, error: LmiServerError) -> None:
        """End `call` with an error, in the form that what was sent before asks for."""
        if call.started:
            self.end(call, Error(call.id, error.kind, error.message))
        else:
            self.end(call, Reply(call.id, *error_reply(call.request.route, error)))

    def is_full(self) -> bool:
        """Tell whether the front end reads more slowly than a stream produces."""
        return self._put - self._left > _UNSENT_LIMIT or self._is_congested()

    def leave(self) -> None:
        """Give what was put to the link. Runs in the link's thread."""
        self._leaving = False
        items = list(_joined(self._taken()))
        if items:
            self._on_items(items)

    def _taken(self) -> Iterator[Item]:
        take = self._items.popleft
        while self._items:
            item = take()
            if isinstance(item, Chunk):
                self._left += len(item.data)
            yield item


def _joined(items: Iterable[Item]) -> Iterator[Item]:
    """Yield `items`, chunks of one answer that follow each other as one."""
    chunks: list[bytes] = []
    call_id = 0
    for item in items:
        if isinstance(item, Chunk):
            if chunks and item.id != call_id:
                yield Chunk(call_id, b"".join(chunks))
                chunks = []
            call_id = item.id
            chunks.append(item.data)
            continue
        if chunks:
            yield Chunk(call_id, b"".join(chunks))
            chunks = []
        yield item
    if chunks:
        yield Chunk(call_id, b"".join(chunks))
