"""The step loop: an engine in a thread of its own, its deltas on the event loop, its failures contained."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import weakref
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
@pytest.mark.parametrize("error", [ValueError, FakePanic])
async def test_a_failed_call_keeps_nothing_alive(error: type[BaseException]) -> None:
    """Its error has a traceback, that the frames of the call, and these must not have the error."""

    class Pixels:
        pass

    async def fails() -> weakref.ref[Pixels]:
        pixels = Pixels()
        held = weakref.ref(pixels)

        def encode(pixels: Pixels = pixels) -> None:
            raise error("cannot encode")

        with pytest.raises((error, HandlerError)):
            await loop.call(encode)
        return held

    loop, _ = await started()
    gc.disable()
    try:
        held = await fails()
        await loop.call(lambda: None)  # the thread has left the one before
        assert held() is None
    finally:
        gc.enable()
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


# --- receivers ---


class FakeReceiver:
    """Collects deltas. By `chance` it wants to be waited for; it raises `error` at the delta `fails_at`.

    `has_some` is set with the fifth delta.
    """

    def __init__(self, chance: float = 0.0, fails_at: str = "", error: type[BaseException] = ValueError) -> None:
        self.texts: list[str] = []
        self.waits = 0
        self.has_some = asyncio.Event()
        self._is_waiting = False
        self._random = random.Random(1)
        self._chance = chance
        self._fails_at, self._error = fails_at, error

    def take(self, delta: Delta) -> bool:
        assert not self._is_waiting, "nothing comes to a receiver that has to be waited for"
        if delta.text == self._fails_at:
            raise self._error("the format fails")
        self.texts.append(delta.text)
        if len(self.texts) == 5:
            self.has_some.set()
        self._is_waiting = self._random.random() < self._chance and delta.finish_reason is None
        return not self._is_waiting

    async def ready(self) -> None:
        self.waits += 1
        await asyncio.sleep(self._random.choice((0, 0, 0.002)))
        self._is_waiting = False


def deliver(loop: StepLoop[CountingEngine], length: int, receiver: FakeReceiver) -> Any:
    async def prepare() -> AddRequest:
        return lambda emit: loop.engine.add(length, emit)

    return loop.deliver(prepare, receiver)


@on_loop
@pytest.mark.parametrize("chance", [0.0, 0.2, 1.0])
async def test_every_delta_comes_once_and_in_order(chance: float) -> None:
    loop, engine = await started()
    receivers = [FakeReceiver(chance) for _ in range(8)]
    await asyncio.gather(*(deliver(loop, 5 * place + 1, receiver) for place, receiver in enumerate(receivers)))
    for place, receiver in enumerate(receivers):
        assert receiver.texts == [str(count) for count in range(5 * place + 1)]
    assert sum(receiver.waits for receiver in receivers) == 0 or chance
    assert not engine.aborted
    await loop.stop()


@on_loop
@pytest.mark.parametrize("error", [ValueError, StopIteration, asyncio.CancelledError, SystemExit])
async def test_what_a_receiver_raises_ends_its_request_alone(error: type[BaseException]) -> None:
    loop, engine = await started()
    broken, sound = FakeReceiver(fails_at="3", error=error), FakeReceiver()
    others = asyncio.create_task(deliver(loop, 400, sound))
    with pytest.raises(RuntimeError if error is StopIteration else error):
        await deliver(loop, 10**9, broken)
    assert broken.texts == ["0", "1", "2"]
    await others
    assert len(sound.texts) == 400
    await loop.call(lambda: None)
    assert len(engine.aborted) == 1
    await loop.stop()


@on_loop
async def test_an_error_comes_behind_the_deltas_before_it() -> None:
    loop, engine = await started()
    receiver = FakeReceiver(0.5)
    asked = asyncio.create_task(deliver(loop, 10**9, receiver))
    await receiver.has_some.wait()
    await loop.call(lambda: engine.add(0, lambda output: None))
    with pytest.raises(HandlerError, match="cannot count to nothing"):
        await asked
    assert receiver.texts == [str(count) for count in range(len(receiver.texts))]
    await loop.stop()


@on_loop
async def test_cancelling_the_task_aborts_the_request_and_nothing_comes_any_more() -> None:
    loop, engine = await started()
    receiver = FakeReceiver()
    asked = asyncio.create_task(deliver(loop, 10**9, receiver))
    await receiver.has_some.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    count = len(receiver.texts)
    await loop.call(lambda: None)
    assert engine.aborted == [1]
    assert len(receiver.texts) == count
    await loop.stop()
