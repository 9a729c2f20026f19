"""The link between the front end and one worker: messages of `lmi_server.contract.protocol` over a Unix socket.

On the wire a message is a 4-byte big-endian length and that many bytes of msgpack. End of file means that the other
side is dead: the kernel closes the socket of a process that ends, however it ends: no timeout is needed. A process that
the worker leaves behind may hold its end open; the front end also looks at the process itself.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from lmi_server.contract.protocol import FromWorker, Load, Message, Submit, ToWorker
from lmi_server.contract.texts.sendable import all_sendable

logger = logging.getLogger(__name__)

_PREFIX = 4
_MAX_FRAME = 2**32 - 1
_LARGE = 64 * 1024  # bytes of a message that is written for itself
_WRITE_HIGH_WATER = 1 << 20  # bytes in the transport's buffer from which `writable` blocks

_encode = msgspec.msgpack.Encoder().encode
to_worker_decoder = msgspec.msgpack.Decoder(ToWorker)
from_worker_decoder = msgspec.msgpack.Decoder(FromWorker)

M = TypeVar("M")


def frame(message: Message) -> tuple[bytes, bytes]:
    """Return the length prefix and the payload of `message`, with escapes in place of lone surrogates.

    Raises msgspec's errors for values that it does not know, and OverflowError over 4 GiB.
    """
    try:
        payload = _encode(message)
    except UnicodeEncodeError:
        payload = _encode(all_sendable(msgspec.to_builtins(message, builtin_types=(bytes,))))
    if len(payload) > _MAX_FRAME:
        raise OverflowError(f"a {type(message).__name__} of {len(payload)} bytes does not fit in one frame of the link")
    return len(payload).to_bytes(_PREFIX, "big"), payload


class Link(asyncio.Protocol, Generic[M]):
    """One end of the link; `M` is what arrives here.

    `on_message` gets each message, in order; `on_lost` is called once, when the other side is gone or `close` was
    called. Messages given to `send` during one tick of the loop leave in one write. While the other side reads more
    slowly than this one sends, a request waits as it is, and what is sent after it waits behind it: encoded, it would
    take its memory a second time.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[M],
        on_message: Callable[[M], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._decode = decoder.decode
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._incoming = bytearray()
        self._needed = _PREFIX
        self._outgoing: list[bytes] = []
        self._waiting: deque[Message] = deque()
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def congested(self) -> bool:
        """True while the other side reads more slowly than this one writes."""
        return not self._writable.is_set()

    async def writable(self) -> None:
        """Wait until the other side has caught up (or is gone)."""
        await self._writable.wait()

    def send(self, message: Message) -> None:
        """Send `message` at the end of this tick, together with the others of the tick."""
        if self._waiting or (isinstance(message, Submit) and self.congested):
            self._waiting.append(message)
            return
        if not self._outgoing:
            # One write per tick, not per message: under load a tick has messages of many requests, and each write
            # costs a system call here and may wake the other side up.
            self._loop.call_soon(self.flush)
        self._encode(message)

    def _encode(self, message: Message) -> None:
        prefix, payload = frame(message)
        if len(payload) < _LARGE:
            self._outgoing += (prefix, payload)
            return
        self._outgoing.append(prefix)
        self.flush()
        if self._transport is not None:  # without another copy
            self._transport.write(payload)

    def flush(self) -> None:
        """Write the messages that `send` collected. On a lost link they are dropped; `on_lost` has been called."""
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and self._transport is not None:
            self._transport.write(b"".join(outgoing))

    def send_now(self, message: Message) -> None:
        """Write `message` at once, after what `send` has collected."""
        self.send(message)
        self.flush()

    def close(self) -> None:
        """Write what was sent, then close this end."""
        while self._waiting:
            self._encode(self._waiting.popleft())
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close this end, whatever is still to be written."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._waiting.clear()
        self._writable.set()
        self._on_lost()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
        while self._waiting and not self.congested:
            self._encode(self._waiting.popleft())
            self.flush()

    def data_received(self, data: bytes) -> None:
        self._incoming += data
        if len(self._incoming) < self._needed:  # a large message arrives in many pieces; parse it once, when complete
            return
        try:
            messages = self._take_messages()
        except msgspec.DecodeError:
            logger.exception("the other side of the link sent a frame that is not a message; closing the link")
            self.abort()
            return
        for message in messages:
            self._on_message(message)

    def _take_messages(self) -> list[M]:
        incoming = self._incoming
        messages: list[M] = []
        start = 0
        # Slices of a memoryview copy nothing. The view must be gone before the bytearray can shrink.
        with memoryview(incoming) as view:
            while True:
                self._needed = _PREFIX
                body = start + _PREFIX
                if len(incoming) < body:
                    break
                length = int.from_bytes(incoming[start:body], "big")
                if len(incoming) < body + length:
                    self._needed = _PREFIX + length
                    break
                messages.append(self._decode(view[body : body + length]))
                start = body + length
        del incoming[:start]
        return messages


class Arrival(asyncio.Protocol):
    """A connection to this process. Its first `size` bytes say who has come.

    `on_arrival` gets these bytes and the transport. It returns the link that takes the connection over; None closes it.
    """

    def __init__(self, size: int, on_arrival: Callable[[bytes, asyncio.Transport], Link[Any] | None]) -> None:
        self._size = size
        self._on_arrival = on_arrival
        self._received = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < self._size:
            return
        said, rest = self._received[: self._size], self._received[self._size :]
        link = self._on_arrival(said, self._transport)
        if link is None:
            self._transport.abort()
            return
        self._transport.set_protocol(link)
        link.connection_made(self._transport)
        if rest:
            link.data_received(rest)


WorkerLink = Link[FromWorker]
"""The front end's end: what arrives is from the worker."""

FrontendLink = Link[ToWorker]
"""The worker's end."""


def worker_link(on_message: Callable[[FromWorker], None], on_lost: Callable[[], None]) -> WorkerLink:
    """Return the front end's end of a link."""
    return Link(from_worker_decoder, on_message, on_lost)


def frontend_link(on_message: Callable[[ToWorker], None], on_lost: Callable[[], None]) -> FrontendLink:
    """Return the worker's end of a link."""
    return Link(to_worker_decoder, on_message, on_lost)


def read_load(connection: socket.socket) -> Load:
    """Read the first message of a worker. It blocks, because there is no event loop yet. Raises EOFError."""
    length = int.from_bytes(_read_exactly(connection, _PREFIX), "big")
    message = to_worker_decoder.decode(_read_exactly(connection, length))
    assert isinstance(message, Load), "the first message is the Load"
    return message


def _read_exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise EOFError("the front end is gone")
        data += part
    return bytes(data)
