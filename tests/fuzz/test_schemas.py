"""A model of random weights answers with what a random schema describes: only the mask of the grammar can do that."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import jsonschema
import pytest
from fuzzing import budget
from hypothesis import given
from hypothesis import strategies as st
from random_schemas import json_schemas
from rolling_batch_helpers import EOS, Engine, Received
from tiny_models import CONTEXT, tiny_model

from handlers.structured_output.compiler import GrammarCache
from handlers.structured_output.token_grammars import CompiledGrammar, GrammarMatch, TokenGrammars
from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import SamplingParameters, StructuredOutputs

pytestmark = pytest.mark.slow

# Noise would go on in a text or a number for ever: these end what can end.
_ENDS = {ord(letter) - 33: 60.0 for letter in '"}]'} | {ord(",") - 33: 40.0, ord(":") - 33: 40.0, EOS: 90.0}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_model("llama"))


async def answer(
    engine: Engine, grammars: GrammarCache[CompiledGrammar], schemas: list[dict[str, Any]]
) -> list[Received | RequestError]:
    """Ask for all schemas at once, in a batch."""
    asked = [StructuredOutputs(kind="json", value=schema, disable_any_whitespace=True) for schema in schemas]
    compiled = await asyncio.gather(*map(grammars.get, asked), return_exceptions=True)
    received: list[Received | RequestError] = []
    for number, grammar in enumerate(compiled):
        if isinstance(grammar, RequestError):
            received.append(grammar)
            continue
        assert not isinstance(grammar, BaseException), grammar
        received.append(Received())
        parameters = SamplingParameters(
            max_new_tokens=CONTEXT - 8, do_sample=True, seed=number, temperature=3.0, logit_bias=_ENDS
        )
        engine.engine.add(str(number), [number], parameters, "", 3, received[-1].take, grammar=GrammarMatch(grammar))
    engine.run()
    return received


def test_answers_match_their_schemas(engine: Engine) -> None:
    ended: Counter[str] = Counter()
    grammars = GrammarCache(TokenGrammars(engine.tokenizer, engine.engine.vocabulary, [EOS]).compile)
    loop = asyncio.Runner()

    @budget(5)
    @given(st.lists(json_schemas(), min_size=12, max_size=12))
    def twelve(schemas: list[dict[str, Any]]) -> None:
        for schema, outcome in zip(schemas, loop.run(answer(engine, grammars, schemas)), strict=True):
            if isinstance(outcome, RequestError):
                ended["refused"] += 1
                assert "cannot be compiled" in str(outcome), (schema, outcome)
                continue
            assert outcome.error is None, (schema, outcome.error)
            ended[outcome.finish_reason or ""] += 1
            if outcome.finish_reason == "eos_token":
                jsonschema.validate(json.loads(outcome.text), schema)

    with loop:
        twelve()
    grammars.stop()
    print(f"{sum(ended.values())} schemas: {dict(ended)}")
    assert ended["eos_token"] > 0.8 * sum(ended.values()), ended
