"""The neuronx handler in the process of a test, over the fakes of Neuron's libraries."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from paths import TESTS

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


async def deltas(handler: NeuronxHandler, prompt: list[int], count: int, **sampling: Any) -> list[Delta]:
    request = GenerationRequest(
        request_id=os.urandom(4).hex(),
        prompt=tuple(prompt),
        sampling=SamplingParameters(max_new_tokens=count, **sampling),
    )
    return [delta async for delta in handler.generate(request)]


def ids(answer: list[Delta]) -> list[int]:
    return [token.id for delta in answer for token in delta.tokens]
