"""Beam search by the likeliest next tokens, without an engine: what it finds, and when it ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing

import pytest
from relay_helpers import on_loop

from handlers.vllm.requests.beam_search import Beam, search
from lmi_server.contract.generation import BeamSearch, TopToken

END = 0
# The greedy way is 1, 1, ...; the likeliest sequence begins with 2, which is less likely at first.
MODEL = {
    (): {1: 0.6, 2: 0.4},
    (1,): {1: 0.4, 2: 0.3, END: 0.3},
    (2,): {2: 0.1, END: 0.9},
    (1, 1): {1: 0.2, END: 0.8},
}
EVEN = {1: 0.5, 2: 0.5}


def found(width: int, length: int = 4, **settings: object) -> tuple[Beam, int]:
    """Return the best beam and the number of steps."""
    calls = 0

    async def likeliest(new: Sequence[int], count: int) -> list[TopToken]:
        nonlocal calls
        calls += 1
        ranked = sorted(MODEL.get(tuple(new), EVEN).items(), key=lambda item: -item[1])
        return [TopToken(token, str(token), math.log(chance)) for token, chance in ranked[:count]]

    async def last() -> Beam:
        best = Beam()
        chosen = BeamSearch(width=width, **settings)  # type: ignore[arg-type]
        async with aclosing(search(chosen, length, frozenset({END}), likeliest)) as steps:
            async for step in steps:
                best = step
        return best

    return asyncio.run(last()), calls


def test_several_beams_find_what_one_misses() -> None:
    assert found(1)[0].ids[0] == 1
    best, _ = found(2)
    assert (best.ids, best.ended) == ([2, END], True)
    assert best.log_prob == pytest.approx(math.log(0.36))


def test_a_length_penalty_prefers_longer_sequences() -> None:
    assert len(found(3, length_penalty=0.0)[0].ids) <= len(found(3, length_penalty=5.0)[0].ids)
    assert len(found(3, length_penalty=5.0, early_stopping="never")[0].ids) == 4


def test_a_search_ends_when_enough_sequences_have_ended() -> None:
    early, never = found(2, 8, early_stopping=True), found(2, 8, early_stopping="never")
    assert early[1] < never[1]


def test_a_search_without_an_end_stops_at_the_limit() -> None:
    assert len(found(2, length=1)[0].ids) == 1


@on_loop
async def test_a_search_that_is_given_up_asks_for_nothing_more() -> None:
    waiting: list[int] = []
    both = asyncio.Event()

    async def likeliest(new: Sequence[int], count: int) -> list[TopToken]:
        if not new:
            return [TopToken(1, "1", -1.0), TopToken(2, "2", -1.0)]
        waiting.append(new[0])
        if len(waiting) == 2:
            both.set()
        try:
            await asyncio.Event().wait()
        finally:
            waiting.remove(new[0])
        raise AssertionError

    async def consume() -> None:
        async with aclosing(search(BeamSearch(width=2), 4, frozenset(), likeliest)) as steps:
            async for _ in steps:
                pass

    task = asyncio.create_task(consume())
    await both.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not waiting
