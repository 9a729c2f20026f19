"""The neuronx handler in the process of a test, over the fakes of Neuron's libraries."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from paths import TESTS
from waiting import wait_until

from handlers.neuronx.handler import NeuronxHandler
from handlers.neuronx.options import NeuronxOptions
from lmi_server.contract.generation import Delta, GenerationRequest, SamplingParameters

FAKE_TRANSFORMERS_NEURONX = TESTS / "support/fake_transformers_neuronx"
FAKE_OPTIMUM_NEURON = TESTS / "support/fake_optimum_neuron"


@contextmanager
def importable(directory: Path, package: str) -> Iterator[None]:
    """Let a fake be imported, and forget it afterwards."""
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]


def options_of(**given: Any) -> NeuronxOptions:
    return NeuronxOptions.model_validate({"n_positions": 64, **given})


@asynccontextmanager
async def started(directory: Path, **given: Any) -> AsyncIterator[NeuronxHandler]:
    handler = NeuronxHandler()
    await handler.start(str(directory), options_of(**given))
    try:
        yield handler
    finally:
        await handler.stop()


def request_of(prompt: list[int], count: int, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=os.urandom(4).hex(),
        prompt=tuple(prompt),
        sampling=SamplingParameters(max_new_tokens=count, **sampling),
    )


async def deltas(handler: NeuronxHandler, prompt: list[int], count: int, **sampling: Any) -> list[Delta]:
    return [delta async for delta in handler.generate(request_of(prompt, count, **sampling))]


def ids(answer: list[Delta]) -> list[int]:
    return [token.id for delta in answer for token in delta.tokens]


class HeldGraphs:
    """Stops the graphs of a fake at each pass until they are let on, and keeps the token ids of each pass."""

    def __init__(self, model: type, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[list[list[int]]] = []
        self._begun, self._allowed = threading.Semaphore(0), threading.Semaphore(0)
        forward: Callable[..., Any] = model.forward  # type: ignore[attr-defined]

        def held(model: Any, input_ids: Any, *more: Any, **named: Any) -> Any:
            self.passes.append(input_ids.tolist())
            self._begun.release()
            assert self._allowed.acquire(timeout=120)
            return forward(model, input_ids, *more, **named)

        monkeypatch.setattr(model, "forward", held)

    async def begun(self) -> None:
        """Wait until one more pass has begun."""
        assert await asyncio.to_thread(self._begun.acquire, timeout=120)

    def let_on(self, passes: int = 1) -> None:
        self._allowed.release(passes)

    def first_with(self, prompt: list[int]) -> int:
        """Return the number of the first pass that computes a prompt."""
        return next(
            number
            for number, rows in enumerate(self.passes)
            if any(row[at : at + len(prompt)] == prompt for row in rows for at in range(len(row)))
        )


async def pass_of_the_next(handler: NeuronxHandler, graphs: HeldGraphs, prompts: list[list[int]]) -> int:
    """Let the first of three requests leave a batch of two during pass 1; return which pass the third begins in."""
    leaving = handler.generate(request_of(prompts[0], 40, ignore_eos=True))
    first = asyncio.ensure_future(anext(leaving))
    await graphs.begun()
    others: list[asyncio.Future[list[Delta]]] = []
    for prompt in prompts[1:]:
        others.append(asyncio.ensure_future(deltas(handler, prompt, 6, ignore_eos=True)))
        # No command is applied while a step is held.
        await asyncio.to_thread(wait_until, lambda: len(handler._loop._commands) == len(others), "a request is added")
    graphs.let_on()
    assert len((await first).tokens) == 1
    await graphs.begun()
    await leaving.aclose()
    graphs.let_on(1000)
    assert [len(ids(answer)) for answer in await asyncio.gather(*others)] == [6, 6]
    return graphs.first_with(prompts[2])
