"""How many lines a model has at a time: many while nothing else is asked of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from relay_helpers import on_loop

from frontend.batches import pace as pace_module
from frontend.batches.pace import Line, LinePace
from lmi_server.serving.models.model import Model


class FakeModel:
    """A model whose live requests a test sets; its lines run until they are given back or told to end."""

    def __init__(self, queue_size: int = 1000) -> None:
        self.live = 0
        self.lines: list[Line] = []
        self.dispatcher = SimpleNamespace(in_flight=0, queued=0)
        self.pool: Any = SimpleNamespace(
            dispatcher=self.dispatcher, settings=SimpleNamespace(job_queue_size=queue_size)
        )

    def count(self) -> None:
        self.dispatcher.in_flight = self.live + len(self.lines)

    async def run(self, pace: LinePace) -> bool:
        """Run one line; return whether it was given back."""
        async with pace.turn(cast("Model", self)) as line:
            ended = asyncio.Event()
            line.give_back = ended.set
            self.lines.append(line)
            self.count()
            try:
                await ended.wait()
            finally:
                self.lines.remove(line)
                line.give_back = None
                self.count()
        return True


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_module, "_LOOK_S", 0.001)
    monkeypatch.setattr(pace_module, "_QUIET_S", (0.02, 0.05))
    monkeypatch.setattr(pace_module, "_GROWTH_S", 0.002)


async def until(condition: Any) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it does not become true")


async def cancelled(tasks: list[asyncio.Task[bool]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@on_loop
async def test_a_quiet_model_has_many_lines_and_gives_back_all_but_the_oldest() -> None:
    model, pace = FakeModel(), LinePace(8, 2)
    tasks = [asyncio.create_task(model.run(pace)) for _ in range(20)]
    await until(lambda: len(model.lines) == 8)
    oldest = model.lines[:2]
    model.live = 3
    model.count()
    await until(lambda: len(model.lines) == 2)
    assert model.lines == oldest
    await asyncio.sleep(0.05)
    assert model.lines == oldest, "no more begin beside live requests"
    model.live = 0
    model.count()
    await until(lambda: len(model.lines) == 8)
    await cancelled(tasks)
    await until(lambda: not pace._lanes)


@on_loop
async def test_with_none_beside_live_requests_all_lines_wait() -> None:
    model, pace = FakeModel(), LinePace(4, 0)
    model.live = 1
    model.count()
    tasks = [asyncio.create_task(model.run(pace)) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert not model.lines
    model.live = 0
    model.count()
    await until(lambda: len(model.lines) == 3)
    await cancelled(tasks)


@on_loop
async def test_lines_leave_room_in_a_short_queue() -> None:
    model, pace = FakeModel(queue_size=8), LinePace(8, 8)
    model.dispatcher.queued = 3
    tasks = [asyncio.create_task(model.run(pace)) for _ in range(3)]
    await asyncio.sleep(0.02)
    assert not model.lines
    model.dispatcher.queued = 2
    await until(lambda: len(model.lines) == 3)
    await cancelled(tasks)


@on_loop
async def test_a_line_that_is_cancelled_while_it_waits_takes_no_turn() -> None:
    model, pace = FakeModel(), LinePace(1, 1)
    first, second, third = (asyncio.create_task(model.run(pace)) for _ in range(3))
    await until(lambda: len(model.lines) == 1)
    await cancelled([second])
    await cancelled([first])
    await until(lambda: len(model.lines) == 1 and first.done())
    await cancelled([third])


@on_loop
async def test_a_request_that_comes_takes_the_lines_back_at_once() -> None:
    model, pace = FakeModel(), LinePace(8, 0)
    tasks = [asyncio.create_task(model.run(pace)) for _ in range(8)]
    await until(lambda: len(model.lines) == 8)
    pace.note_live()
    assert all(line.was_taken for line in model.lines)
    await cancelled(tasks)


@pytest.mark.parametrize(
    ("quiet_s", "beside", "allowed"), [(-1, 0, 0), (-1, 2, 2), (0, 0, 1), (0.0045, 0, 4), (9, 3, 10)]
)
def test_the_lines_of_a_quiet_model_grow(quiet_s: float, beside: int, allowed: int) -> None:
    assert LinePace(10, beside)._allowed_lines(quiet_s) == allowed


@on_loop
async def test_models_do_not_wait_for_each_other() -> None:
    busy, idle, pace = FakeModel(), FakeModel(), LinePace(4, 0)
    busy.live = 1
    busy.count()
    tasks = [asyncio.create_task(model.run(pace)) for model in (busy, idle) for _ in range(2)]
    await until(lambda: len(idle.lines) == 2)
    assert not busy.lines
    await cancelled(tasks)
