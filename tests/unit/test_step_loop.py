"""The step loop: an engine in a thread of its own, its deltas on the event loop, its failures contained."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from relay_helpers import on_loop

from handlers.step_loop import AddRequest, StepLoop
from lmi_server.contract.errors import HandlerError, ModelLoadError, ModelNotReadyError
from lmi_server.contract.generation import Delta


class FakePanic(BaseException):
    """Like the PanicException of libraries in Rust, tokenizers among them, which is no Exception."""


class CountingEngine:
    """Emits, for each request, the numbers up to its length, one per step; a request of length 0 fails the step.

    `error` is what it raises.
    """

    error: type[BaseException] = RuntimeError

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.requests: dict[int, tuple[int, int, Callable[[Any], None]]] = {}
        self.aborted: list[int] = []
        self.steps: list[list[int]] = []
        self._numbers = itertools.count(1)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, length: int, emit: Callable[[Any], None]) -> int:
        if length < 0:
            raise self.error("a negative length")
        number = next(self._numbers)
        self.requests[number] = (0, length, emit)
        return number

    def step(self) -> None:
        assert threading.current_thread() is self.thread
        self.steps.append(list(self.requests))
        for number, (count, length, emit) in list(self.requests.items()):
            if length == 0:
                raise self.error("cannot count to nothing")
            self.requests[number] = (count + 1, length, emit)
            last = count + 1 == length
            if last:
                del self.requests[number]
            emit(Delta(str(count), finish_reason="length" if last else None))

    def abort(self, number: int) -> None:
        self.aborted.append(number)
        self.requests.pop(number, None)

    def fail_running(self, error: BaseException) -> None:
        requests, self.requests = self.requests, {}
        for _, _, emit in requests.values():
            emit(HandlerError(str(error)))


async def started() -> tuple[StepLoop[CountingEngine], CountingEngine]:
    loop = StepLoop(CountingEngine)
    return loop, await loop.start()


def generate(loop: StepLoop[CountingEngine], length: int) -> AsyncGenerator[Delta, None]:
    async def prepare() -> AddRequest:
        return lambda emit: loop.engine.add(length, emit)

    return loop.generate(prepare)


async def collect(loop: StepLoop[CountingEngine], length: int) -> str:
    deltas = [delta async for delta in generate(loop, length)]
    return "".join(delta.text for delta in deltas)


@on_loop
async def test_requests_run_together_in_the_thread_that_built_the_engine() -> None:
    loop, engine = await started()
    assert engine.thread is not threading.current_thread()
    assert await asyncio.gather(collect(loop, 3), collect(loop, 5)) == ["012", "01234"]
    await loop.stop()


@on_loop
async def test_an_idle_engine_gathers_what_is_sent_together() -> None:
    loop = StepLoop(CountingEngine, gather_s=0.5)
    engine = await loop.start()
    first = asyncio.create_task(collect(loop, 2))
    await asyncio.sleep(0.05)
    assert await asyncio.gather(first, collect(loop, 2)) == ["01", "01"]
    assert engine.steps == [[1, 2], [1, 2]]
    await loop.stop()


@on_loop
async def test_gathering_ends_even_if_requests_never_cease() -> None:
    loop = StepLoop(CountingEngine, gather_s=0.2)
    engine = await loop.start()
    sent = []
    while not engine.steps:
        sent.append(asyncio.create_task(collect(loop, 1)))
        await asyncio.sleep(0.05)
        assert len(sent) < 200
    assert await asyncio.gather(*sent) == ["0"] * len(sent)
    await loop.stop()


@on_loop
async def test_start_raises_what_building_the_engine_raises() -> None:
    def build() -> CountingEngine:
        raise ModelLoadError("no model here")

    with pytest.raises(ModelLoadError, match="no model here"):
        await StepLoop(build).start()


@on_loop
async def test_closing_the_generator_aborts_the_request() -> None:
    loop, engine = await started()
    deltas = generate(loop, 10**9)
    assert (await anext(deltas)).text == "0"
    await deltas.aclose()
    assert await collect(loop, 1) == "0", "commands are applied in order, so the abort is done"
    assert engine.aborted == [1]
    assert not engine.has_work
    await loop.stop()


@on_loop
async def test_closing_one_of_several_generators_aborts_its_own_request() -> None:
    loop, engine = await started()
    left, stays = generate(loop, 10**9), generate(loop, 10**9)
    assert [(await anext(deltas)).text for deltas in (left, stays)] == ["0", "0"]
    await left.aclose()
    assert await collect(loop, 1) == "0"
    assert engine.aborted == [1]
    assert (await anext(stays)).text == "1"
    await stays.aclose()
    await loop.stop()


@on_loop
async def test_closing_a_generator_whose_request_was_refused_aborts_nothing() -> None:
    loop, engine = await started()
    holding, refused = asyncio.Event(), asyncio.Event()

    def wait() -> None:
        loop.on_loop(holding.set)()
        asyncio.run_coroutine_threadsafe(refused.wait(), event_loop).result()

    event_loop = asyncio.get_running_loop()
    held = asyncio.create_task(loop.call(wait))  # the engine's thread is busy until the client has left
    await holding.wait()
    leaving = asyncio.create_task(collect(loop, -1))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    refused.set()
    await held
    assert await collect(loop, 1) == "0"
    assert engine.aborted == []
    await loop.stop()


@pytest.mark.parametrize("error", [FakePanic, SystemExit, KeyboardInterrupt, GeneratorExit])
@on_loop
async def test_what_is_no_exception_ends_its_requests_and_the_next_one_is_served(error: type[BaseException]) -> None:
    loop, engine = await started()
    engine.error = error

    def panic() -> None:
        raise error("in a call")

    with pytest.raises(HandlerError, match="cannot count"):
        await collect(loop, 0)
    with pytest.raises(HandlerError, match=f"{error.__name__}: a negative length"):
        await collect(loop, -1)
    with pytest.raises(HandlerError, match=f"{error.__name__}: in a call"):
        await loop.call(panic)
    assert await collect(loop, 2) == "01"
    await loop.stop()


@on_loop
async def test_a_failed_step_ends_its_requests_and_the_next_one_is_served() -> None:
    loop, _ = await started()
    with pytest.raises(HandlerError, match="cannot count"):
        await collect(loop, 0)
    assert await collect(loop, 2) == "01"
    await loop.stop()


@on_loop
async def test_a_request_that_the_engine_does_not_take_ends_alone() -> None:
    loop, _ = await started()
    with pytest.raises(HandlerError, match="a negative length"):
        await collect(loop, -1)
    assert await collect(loop, 2) == "01"
    await loop.stop()


@on_loop
async def test_a_stopped_loop_takes_nothing_more() -> None:
    loop, _ = await started()
    await loop.stop()
    with pytest.raises(ModelNotReadyError):
        await collect(loop, 1)


@on_loop
async def test_a_loop_that_stops_while_a_request_is_prepared_refuses_it() -> None:
    loop, _ = await started()

    async def prepare() -> AddRequest:
        await loop.stop()
        return lambda emit: 1

    with pytest.raises(ModelNotReadyError):
        await anext(loop.generate(prepare))
