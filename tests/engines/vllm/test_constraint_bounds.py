"""Constraints that would hold up vLLM, or take all memory, are refused before vLLM sees them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from handlers.vllm.handler import VllmHandler
from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import GenerationRequest, SamplingParameters, StructuredOutputs


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("json", {"type": "array", "minItems": 100_000}, "minItems: 100000 is not allowed"),
        ("choice", [str(number) for number in range(20_000)], "choice has 20000 texts"),
        ("regex", "(?=a)b", "the regular expression cannot be compiled"),
    ],
)
def test_it_is_refused_by_name(kind: Any, value: Any, said: str) -> None:
    async def ask() -> None:
        handler = VllmHandler()  # whose engine is never asked
        sampling = SamplingParameters(structured_outputs=StructuredOutputs(kind=kind, value=value))
        try:
            await anext(handler.generate(GenerationRequest(request_id="1", prompt="x", sampling=sampling)))
        finally:
            handler._grammars.stop()

    with pytest.raises(RequestError) as refused:
        asyncio.run(ask())
    assert said in str(refused.value)
