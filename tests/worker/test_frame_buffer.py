"""The buffer between the answers of a worker and its link: what leaves, in which order, and from which thread."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from relay_helpers import on_loop

from lmi_server.contract.errors import HandlerError
from lmi_server.contract.link import frame
from lmi_server.contract.protocol import Chunk, End, Error, Frames, Head, Input, Item, Reply, Submit
from lmi_server.worker.answers.frame_buffer import FrameBuffer, ResponseWriter


class Sink:
    """Keeps what is sent; `room` is set while it is not congested."""

    def __init__(self) -> None:
        self.sent: list[list[Item]] = []
        self.room = asyncio.Event()
        self.room.set()

    @property
    def congested(self) -> bool:
        return not self.room.is_set()

    async def writable(self) -> None:
        await self.room.wait()

    def send_now(self, message: Frames) -> None:
        self.sent.append(message.items)


def submit(number: int, **properties: str) -> Submit:
    return Submit(number, Input("invocations", {name.replace("_", "-"): text for name, text in properties.items()}, []))


def opened(buffer: FrameBuffer, number: int, prefix: bytes = b"") -> ResponseWriter:
    writer = ResponseWriter(buffer, submit(number))
    writer.open(200, [], prefix)
    return writer


@on_loop
async def test_what_all_requests_produce_in_one_turn_leaves_as_one_message() -> None:
    sink = Sink()
    buffer = FrameBuffer(sink)
    first, second = opened(buffer, 1, b"<"), opened(buffer, 2)
    for data in (b"a", b"b"):
        first.chunk(data)
        second.chunk(data)
    first.end()
    assert sink.sent == []
    await asyncio.sleep(0)
    assert sink.sent == [[Head(1, 200, []), Chunk(1, b"<ab"), Head(2, 200, []), Chunk(2, b"ab"), End(1)]]
    second.chunk(b"c")
    second.end()
    await asyncio.sleep(0)
    assert sink.sent[1:] == [[Chunk(2, b"c"), End(2)]]


@on_loop
async def test_each_piece_leaves_by_itself_if_the_request_keeps_chunks() -> None:
    sink = Sink()
    writer = ResponseWriter(FrameBuffer(sink), submit(1, x_synchronous="False"))
    writer.open(200, [], b"<")
    writer.chunk(b"a")
    writer.chunk(b"b")
    await asyncio.sleep(0)
    writer.chunk(b"c")
    writer.end()
    await asyncio.sleep(0)
    head = [Head(1, 200, []), Chunk(1, b"<"), Chunk(1, b"a"), Chunk(1, b"b")]
    assert sink.sent == [head, [Chunk(1, b"c"), End(1)]]


@on_loop
async def test_a_stream_without_bytes_is_a_whole_answer_without_a_body() -> None:
    sink = Sink()
    buffer = FrameBuffer(sink)
    opened(buffer, 1).end()
    opened(buffer, 2, b"[").end()
    buffer.flush()
    assert sink.sent == [[Reply(1, 200, [], b""), Head(2, 200, []), Chunk(2, b"["), End(2)]]


@on_loop
async def test_an_error_has_a_status_of_its_own_until_the_first_bytes() -> None:
    sink = Sink()
    buffer = FrameBuffer(sink)
    early, late = opened(buffer, 1), opened(buffer, 2)
    late.chunk(b"a")
    for writer in (early, late):
        writer.fail(HandlerError("it broke"))
    buffer.flush()
    reply, *_, error = sorted(sink.sent[0], key=lambda item: item.id)
    assert isinstance(reply, Reply)
    assert reply.status >= 400
    assert error == Error(2, "HandlerError", "it broke")
    with pytest.raises(AssertionError, match="request 2 ends twice"):
        late.end()


@on_loop
async def test_nothing_leaves_after_the_close() -> None:
    sink = Sink()
    buffer = FrameBuffer(sink)
    writer = opened(buffer, 1)
    writer.chunk(b"a")
    buffer.close()
    writer.chunk(b"b")
    writer.end()
    await asyncio.sleep(0)
    assert sink.sent == [[Head(1, 200, []), Chunk(1, b"a")]]


@on_loop
async def test_a_producer_waits_for_a_congested_link() -> None:
    for from_other_thread in (False, True):
        sink = Sink()
        buffer = FrameBuffer(sink, from_other_thread)
        sink.room.clear()
        waiting = asyncio.create_task(buffer.yield_and_drain())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        sink.room.set()
        await asyncio.wait_for(waiting, 10)


@on_loop
async def test_a_producer_far_ahead_of_the_flush_finds_the_buffer_full() -> None:
    buffer = FrameBuffer(Sink(), from_other_thread=True)
    writer = opened(buffer, 1)
    for _ in range(3):
        writer.chunk(bytes(1 << 19))
        buffer.count(1 << 19)
    assert buffer.is_full
    buffer.flush()
    assert not buffer.is_full


@on_loop
async def test_no_byte_of_another_thread_is_lost_or_out_of_order() -> None:
    """The thread and the loop take turns as the interpreter likes, so that flushes meet every state of the writers."""
    sink = Sink()
    buffer = FrameBuffer(sink, from_other_thread=True)
    streams, pieces = 4, 20_000

    def produce() -> None:
        writers = [opened(buffer, number) for number in range(streams)]
        for piece in range(pieces):
            for writer in writers:
                writer.chunk(b"%d " % piece)
        for writer in writers:
            writer.end()

    thread = threading.Thread(target=produce)
    thread.start()
    ended = 0
    while ended < streams:
        await asyncio.sleep(0)
        ended = sum(isinstance(item, End) for items in sink.sent for item in items)
    thread.join()
    expected = b"".join(b"%d " % piece for piece in range(pieces))
    for number in range(streams):
        first, *chunks, last = [item for items in sink.sent for item in items if item.id == number]
        assert (first, last) == (Head(number, 200, []), End(number))
        assert b"".join(chunk.data for chunk in chunks if isinstance(chunk, Chunk)) == expected


class EncodingSink(Sink):
    """Encodes what is sent, as the link does."""

    def send_now(self, message: Frames) -> None:
        frame(message)
        super().send_now(message)


def items_of(sink: Sink, number: int) -> list[Item]:
    return [item for items in sink.sent for item in items if item.id == number]


@on_loop
async def test_an_answer_that_cannot_be_encoded_fails_its_own_request_only() -> None:
    sink = EncodingSink()
    buffer = FrameBuffer(sink)
    streams = [opened(buffer, number) for number in (1, 2)]
    strange: list[Any] = [2**100, object()]
    for stream in streams:
        stream.chunk(b"a")
    for number, status in enumerate(strange, 10):
        ResponseWriter(buffer, submit(number)).reply(status, [], b"")
    broken = ResponseWriter(buffer, submit(20))
    broken.open(strange[0], [])
    broken.chunk(b"a")
    buffer.flush()
    for stream in (*streams, broken):
        stream.chunk(b"b")
        stream.end()
    buffer.flush()
    for number in (1, 2):
        assert items_of(sink, number) == [Head(number, 200, []), Chunk(number, b"a"), Chunk(number, b"b"), End(number)]
    for number in (10, 11, 20):
        [error] = items_of(sink, number)
        assert isinstance(error, Error)
        assert "the answer of the handler cannot be sent" in error.message


@on_loop
async def test_errors_with_lone_surrogates_end_their_requests_and_no_others() -> None:
    sink = EncodingSink()
    buffer = FrameBuffer(sink)
    before, begun = opened(buffer, 1), opened(buffer, 2)
    begun.chunk(b"a")
    for writer in (before, begun):
        writer.fail(HandlerError("a \ud800"))
    opened(buffer, 3).reply(200, [], b"c")
    buffer.flush()
    [reply] = items_of(sink, 1)
    assert isinstance(reply, Reply)
    assert b"a \\\\ud800" in reply.data
    assert items_of(sink, 2)[-1] == Error(2, "HandlerError", "a \\ud800")
    assert items_of(sink, 3) == [Reply(3, 200, [], b"c")]


@on_loop
async def test_the_table_has_the_requests_that_have_not_ended() -> None:
    buffer = FrameBuffer(Sink())
    first, second = (buffer.new_writer(submit(number)) for number in (1, 2))
    idle = asyncio.create_task(buffer.wait_idle())
    first.reply(200, [], b"")
    assert buffer.writers == {1: first, 2: second}
    await asyncio.sleep(0.01)
    assert (buffer.writers, idle.done()) == ({2: second}, False)
    second.open(200, [])
    second.chunk(b"a")
    await asyncio.sleep(0.01)
    assert buffer.writers == {2: second}
    second.end()
    await asyncio.wait_for(idle, 10)
    assert buffer.writers == {}
    await buffer.wait_idle()  # at once, if there is nothing to wait for


@on_loop
async def test_progress_is_reported_once() -> None:
    buffer = FrameBuffer(Sink())
    first, second = (buffer.new_writer(submit(number)) for number in (1, 2))
    first.progressed = True
    assert buffer.take_progressed() == [1]
    second.progressed = True
    assert buffer.take_progressed() == [2]
    assert buffer.take_progressed() == []
