"""Constraints that would hold up vLLM, or take all memory, are refused before vLLM sees them.

One that vLLM itself cannot compile is refused with 400, too.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from product_helpers import Server

from handlers.vllm.handler import VllmHandler
from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import GenerationRequest, SamplingParameters, StructuredOutputs

REFUSED: list[tuple[str, Any, str]] = [
    ("json", {"type": "array", "minItems": 100_000}, "minItems: 100000 is not allowed"),
    ("choice", [str(number) for number in range(20_000)], "choice has 20000 texts"),
    ("choice", [f"{number:030}" for number in range(3000)], "choice has 90000 characters in its texts"),
    ("json", {"enum": [f"{number:030}" for number in range(3000)]}, "enum and const has 90000 characters"),
    ("regex", "(?=a)b", "the regular expression cannot be compiled"),
]


@pytest.mark.parametrize(("kind", "value", "said"), REFUSED)
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


@pytest.mark.slow
def test_vllm_answers_with_400_what_it_cannot_compile_and_goes_on(ours: Server) -> None:
    def ask(kind: str, value: Any) -> tuple[int, str]:
        body = {"prompt": "x", "max_tokens": 3, "structured_outputs": {kind: value}}
        reply = ours.http.post("/v1/completions", json=body)
        return reply.status_code, reply.json().get("error", {}).get("message", "")

    assert ask("choice", ["a", "b"]) == (200, "")
    for kind, value, said in REFUSED:
        status, message = ask(kind, value)
        assert (status, said in message) == (400, True), message
    # Of vLLM's libraries xgrammar cannot compile the pattern, and llguidance not so many choices. The first constraint
    # of the server decides which library it has.
    answers = [ask("regex", r"\p{L}+"), ask("choice", [f"text {number}" for number in range(3000)])]
    assert sorted(status for status, _ in answers) == [200, 400], answers
    assert any("vLLM cannot compile" in message for _, message in answers)
