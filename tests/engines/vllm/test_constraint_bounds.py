"""Constraints that would hold up vLLM, or take all memory, are refused before vLLM sees them.

One that vLLM itself cannot compile is refused with 400, too.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
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
    ("json", {"type": "string", "pattern": "^(?=a)b$"}, "look-around"),
    ("json", {"type": "integer", "not": {"const": 3}}, '"not"'),
    ("json", {"type": "array", "uniqueItems": True}, '"uniqueItems"'),
    ("json", {"type": "object", "dependentRequired": {"a": ["b"]}}, '"dependentRequired"'),
    ("json", {"type": "string", "format": "no such"}, "Unknown format: no such"),
]
# What an engine could ignore without a word.
HELD: list[dict[str, Any]] = [
    {"allOf": [{"type": "string"}, {"enum": ["yes", "no"]}]},
    {"type": "number", "minimum": 1, "maximum": 9, "multipleOf": 0.5},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": "^[^a]{3}$"},
    {"enum": ["ab", "cd"], "pattern": "^a"},
    {"$ref": "#/$defs/text", "maxLength": 2, "$defs": {"text": {"type": "string"}}},
    {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a", "c"], "additionalProperties": {"const": 2}},
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
    # One library compiles them all, whichever came first.
    for kind, value in (("regex", r"\p{L}+"), ("choice", [f"text {number}" for number in range(3000)])):
        assert ask(kind, value) == (200, "")


@pytest.mark.slow
@pytest.mark.parametrize("schema", HELD, ids=lambda schema: ",".join(map(str, schema)))
def test_every_keyword_of_a_schema_holds(ours: Server, schema: dict[str, Any]) -> None:
    constraint = {"json": schema, "disable_any_whitespace": True}
    body = {"prompt": "x", "max_tokens": 60, "n": 12, "temperature": 2.0, "seed": 5, "structured_outputs": constraint}
    reply = ours.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    whole = [choice["text"] for choice in reply.json()["choices"] if choice["finish_reason"] == "stop"]
    assert whole
    for text in whole:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.slow
def test_white_space_is_as_the_request_says(ours: Server) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 8, "maxItems": 8}
    sampled = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 60}
    for pattern, form in (("[ ]?", r"\[1( ?, ?1){7}\]"), (r"[\n]{0,2}", r"\[1(\n{0,2},\n{0,2}1){7}\]")):
        parameters = {"guided_json": schema, "guided_whitespace_pattern": pattern, **sampled}
        reply = ours.http.post("/invocations", json={"inputs": "x", "parameters": parameters})
        assert re.fullmatch(form, reply.json()["generated_text"]), reply.text
    parameters["guided_whitespace_pattern"] = "[ ]+"
    refused = ours.http.post("/invocations", json={"inputs": "x", "parameters": parameters})
    assert (refused.status_code, "whitespace_pattern: [ ]+ is not allowed" in refused.text) == (424, True)
