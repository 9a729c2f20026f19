"""The reply slot: what is written past its reader and what the reader takes is the answer, in order."""

from __future__ import annotations

import asyncio
import random

import pytest
from relay_helpers import on_loop

from lmi_server.contract.protocol import Chunk, End, Head
from lmi_server.supervisor.job import ReplySlot


async def read(slot: ReplySlot, sent: list[bytes], chance: random.Random) -> None:
    """Read as the relay does; at times the client has to be waited for."""
    while True:
        terminal = slot.terminal
        data = slot.take()
        if data:
            await asyncio.sleep(chance.choice((0, 0, 0.001)))
            sent.append(data)
        if terminal is not None and not slot.unread:
            return
        await slot.wait()


@on_loop
@pytest.mark.parametrize("seed", range(20))
async def test_chunks_leave_in_order_whoever_writes_them(seed: int) -> None:
    chance = random.Random(seed)
    sent: list[bytes] = []
    past: list[bytes] = []

    def write_chunk(data: bytes) -> bool:
        if chance.random() < 0.3:
            return False
        assert not slot.unread, "what the reader has to send comes first"
        sent.append(data)
        past.append(data)
        return True

    slot = ReplySlot()
    slot.put(Head(1, 200, []), 0.0)
    reader = asyncio.create_task(read(slot, sent, chance))
    chunks = [b"%d," % number for number in range(200)]
    for chunk in chunks:
        if chunk == b"5,":
            slot.write_chunk = write_chunk
        slot.put(Chunk(1, chunk), 0.0)
        if chance.random() < 0.5:
            await asyncio.sleep(chance.choice((0, 0, 0, 0.003)))
    slot.put(End(1), 0.0)
    await reader
    assert b"".join(sent) == b"".join(chunks)
    assert past


@on_loop
async def test_nothing_is_written_for_a_reader_that_has_been_cancelled() -> None:
    slot = ReplySlot()
    slot.put(Head(1, 200, []), 0.0)
    reader = asyncio.create_task(slot.wait())
    await asyncio.sleep(0)
    slot.write_chunk = lambda data: pytest.fail("written")
    reader.cancel()
    await asyncio.sleep(0)
    slot.put(Chunk(1, b"a"), 0.0)
    assert slot.take() == b"a"
