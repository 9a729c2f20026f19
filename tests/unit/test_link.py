from __future__ import annotations

import asyncio
import socket
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relay_helpers import on_loop

from lmi_server.contract.link import Link, frame, from_worker_decoder, frontend_link, worker_link
from lmi_server.contract.protocol import (
    Cancel,
    Chunk,
    End,
    Error,
    Failed,
    Frames,
    FromWorker,
    Head,
    Input,
    Load,
    Ready,
    Reply,
    Shutdown,
    Stats,
    Submit,
)

MESSAGES: list[Any] = [
    Frames([Head(1, 200, [("content-type", "text/plain")]), Chunk(1, b"\x00\xff" * 300), End(1)]),
    Stats({"running_requests": 2.0}),
    Frames([Reply(7, 503, [], b"")]),
    Frames([]),
]


def receive(pieces: list[bytes]) -> list[FromWorker]:
    """Return what a link makes of bytes that arrive in these pieces."""

    async def main() -> list[FromWorker]:
        received: list[FromWorker] = []
        link = Link(from_worker_decoder, received.append, lambda: None)
        for piece in pieces:
            link.data_received(piece)
        return received

    return asyncio.run(main())


@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.lists(st.integers(1, 700), min_size=1))
def test_messages_arrive_whole_and_in_order_however_the_bytes_are_cut(messages: list[Any], cuts: list[int]) -> None:
    data = b"".join(part for message in messages for part in frame(message))
    pieces = []
    while data:
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(data[:size])
        data = data[size:]
    assert receive(pieces) == messages


class Pair:
    """A front end's and a worker's link over one Unix socket pair."""

    def __init__(self) -> None:
        self.at_frontend: list[Any] = []
        self.at_worker: list[Any] = []
        self.lost = asyncio.Event()
        self.arrived = asyncio.Event()
        self.frontend = worker_link(self._at_frontend, self.lost.set)
        self.worker = frontend_link(self._at_worker, lambda: None)

    def _at_frontend(self, message: Any) -> None:
        self.at_frontend.append(message)
        self.arrived.set()

    def _at_worker(self, message: Any) -> None:
        self.at_worker.append(message)
        self.arrived.set()

    async def connect(self) -> Pair:
        one, other = socket.socketpair(socket.AF_UNIX)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self.frontend, sock=one)
        await loop.create_unix_connection(lambda: self.worker, sock=other)
        return self


@on_loop
async def test_both_directions() -> None:
    pair = await Pair().connect()
    to_worker = [
        Load("m", "dir", "module:Class", {"a": "1"}, ["m"]),
        Submit(1, Input("invocations", {"x": "y"}, [("data", b"\xff")])),
        Cancel(1),
        Shutdown(2.5),
    ]
    for message in to_worker:
        pair.frontend.send(message)
    pair.worker.send(MESSAGES[0])
    while len(pair.at_worker) < 4 or not pair.at_frontend:
        pair.arrived.clear()
        await pair.arrived.wait()
    assert pair.at_worker == to_worker
    assert pair.at_frontend == [MESSAGES[0]]
    pair.worker.close()
    await pair.lost.wait()


@on_loop
async def test_what_was_sent_before_the_end_still_arrives() -> None:
    pair = await Pair().connect()
    pair.worker.send(Frames([Chunk(1, b"x" * 3_000_000)]))
    pair.worker.close()
    await pair.lost.wait()
    assert len(pair.at_frontend[0].items[0].data) == 3_000_000
    pair.frontend.send(Cancel(1))  # to a dead worker: it is dropped, on_lost has been called


@pytest.mark.parametrize(
    "garbage", [b"\x00\x00\x00\x02{}", b"\x00\x00\x00\x01\x90", b"\x7f\xff\xff\xff" + b"\xc1" * 70000]
)
@on_loop
async def test_bytes_that_are_no_message_end_the_link(garbage: bytes) -> None:
    lost = asyncio.Event()
    link = worker_link(lambda message: None, lost.set)
    one, other = socket.socketpair(socket.AF_UNIX)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=one)
    _, writer = await asyncio.open_unix_connection(sock=other)
    writer.write(garbage)
    if garbage[0]:
        writer.close()  # a length that never arrives: the end of file ends it
    await lost.wait()
    writer.close()


@on_loop
async def test_a_slow_reader_makes_the_writer_wait() -> None:
    worker = frontend_link(lambda message: None, lambda: None)
    one, other = socket.socketpair(socket.AF_UNIX)
    await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=one)
    assert not worker.congested
    while not worker.congested:
        worker.send(Frames([Chunk(1, b"x" * 500_000)]))
        worker.flush()
    other.setblocking(False)
    loop = asyncio.get_running_loop()
    waiting = asyncio.create_task(worker.writable())
    while not waiting.done():
        await loop.sock_recv(other, 1 << 20)
    assert not worker.congested
    worker.close()
    other.close()


@pytest.mark.parametrize("closes", [False, True])
@on_loop
async def test_large_messages_wait_as_they_are_and_arrive_in_order(closes: bool) -> None:
    """A copy of each would take its memory a second time while the other side does not read."""

    pair = await Pair().connect()
    assert pair.worker._transport is not None
    pair.worker._transport.pause_reading()
    bodies = [bytes([number]) * 4_000_000 for number in range(10)]
    messages: list[Any] = []
    for number, body in enumerate(bodies):
        messages += [Submit(number, Input("invocations", {}, [("data", body)])), Cancel(number)]
    tracemalloc.start()
    for message in messages:
        pair.frontend.send(message)
        await asyncio.sleep(0)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < 3 * len(bodies[0])
    if closes:
        pair.frontend.close()
    pair.worker._transport.resume_reading()
    while len(pair.at_worker) < len(messages):
        pair.arrived.clear()
        await pair.arrived.wait()
    assert pair.at_worker == messages
    pair.worker.close()
    await pair.lost.wait()


@on_loop
async def test_an_answer_that_cannot_be_encoded_is_refused_while_the_other_side_reads_slowly() -> None:
    """Later, nothing would know which request it belongs to."""

    pair = await Pair().connect()
    assert pair.frontend._transport is not None
    pair.frontend._transport.pause_reading()
    pair.worker.send_now(Frames([Chunk(1, b"x" * 4_000_000)]))
    assert pair.worker.congested
    unknown: Any = object()
    with pytest.raises(TypeError):
        pair.worker.send_now(Frames([Chunk(1, unknown)]))
    pair.worker.send_now(Frames([End(1)]))
    pair.frontend._transport.resume_reading()
    while len(pair.at_frontend) < 2:
        pair.arrived.clear()
        await pair.arrived.wait()
    assert pair.at_frontend[1] == Frames([End(1)])
    pair.worker.close()
    await pair.lost.wait()


@pytest.mark.parametrize(
    ("message", "arrived"),
    [
        (Frames([Error(1, "HandlerError", "a\ud800")]), Frames([Error(1, "HandlerError", "a\\ud800")])),
        (
            Frames([Head(1, 200, [("\udcff", "\ud800")], "\ud800"), Chunk(1, b"\xff"), End(1)]),
            Frames([Head(1, 200, [("\\udcff", "\\ud800")], "\\ud800"), Chunk(1, b"\xff"), End(1)]),
        ),
        (Failed("ModelLoadError", "\ud800"), Failed("ModelLoadError", "\\ud800")),
        (Stats({"\ud800": 1.0}), Stats({"\\ud800": 1.0})),
        (Ready(1, {"a": ["\ud800", 1]}), Ready(1, {"a": ["\\ud800", 1]})),
    ],
)
def test_lone_surrogates_arrive_as_escapes(message: Any, arrived: FromWorker) -> None:
    assert receive([b"".join(frame(message))]) == [arrived]
