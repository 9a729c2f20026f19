"""option.activation_dtype=int8 beside what else an engine does: each answer is that of its request alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from adapter_helpers import read_adapter, save_adapter
from pipeline_helpers import LoadTask, ask
from rolling_batch_helpers import EOS, Engine, GivenStepTimes, Received, prompts, round_any_rows
from tiny_models import CONTEXT, llama_of_whole_blocks, saved_model
from transformers import AutoModelForCausalLM

from handlers.checkpoints.quantization import rounds_activations
from handlers.checkpoints.transformers_loading import load_model
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.runner.load_check import LoadCheck
from handlers.rolling_batch.speculation.drafting import Speculation
from handlers.structured_output.grammar_text import grammar_text
from handlers.structured_output.token_grammars import GrammarMatch, TokenGrammars
from lmi_server.contract.generation import SamplingParameters, StructuredOutputs

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}, "is_new": {"type": "boolean"}},
    "required": ["size", "is_new"],
    "additionalProperties": False,
}


class Rounding(Engine):
    """An engine that rounds activations to 8 bits in all batches, with one adapter."""

    def __init__(self, model: Any, adapter: Path) -> None:
        super().__init__(copy.deepcopy(model), slots=32, check=LoadCheck(model, CONTEXT, rounds_activations(model)))
        round_any_rows(self.model)
        self.adapter = self.engine.load_adapter(read_adapter(str(adapter)))

    def ask_json(self, prompt: list[int]) -> Received:
        answer, asked = Received(), SamplingParameters(max_new_tokens=60)
        grammars = TokenGrammars(self.tokenizer, self.engine.vocabulary, [EOS])
        constraint = StructuredOutputs(kind="json", value=SCHEMA, disable_any_whitespace=True)
        grammar = GrammarMatch(grammars.compile(grammar_text(constraint)))
        self.engine.add("label", prompt, asked, "", 3, answer.take, grammar=grammar)
        return answer

    def ask(self, prompt: list[int], kind: str) -> Received:
        """Ask for an answer of a kind: "json", "adapted", or any other."""
        if kind == "json":
            return self.ask_json(prompt)
        return self.add(prompt, self.adapter if kind == "adapted" else None, max_new_tokens=12)[1]


@pytest.fixture(scope="module", params=[("bf16", "q8_0"), ("fp32", "q4_0")], ids="-".join)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes an engine."""
    dtype, weights = request.param
    plain, adapter = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("adapter")
    saved_model(llama_of_whole_blocks(), plain)
    save_adapter(llama_of_whole_blocks(), adapter)
    options = HuggingFaceOptions.model_validate({"dtype": dtype, "quantize": weights, "activation_dtype": "int8"})
    model = load_model(AutoModelForCausalLM, str(plain), options)
    return lambda: Rounding(model, adapter)


def test_requests_of_all_kinds_in_one_batch_get_what_they_get_alone(make: Any) -> None:
    together, alone, kinds = make(), make(), ("plain", "json", "adapted")
    asked = [(prompt, kinds[place % 3]) for place, prompt in enumerate(prompts(9))]
    answers = [together.ask(*each) for each in asked]
    together.run()
    for (prompt, kind), answer in zip(asked, answers, strict=True):
        expected = alone.ask(prompt, kind)
        alone.run()
        assert answer.tokens == expected.tokens, kind
        if kind == "json":
            found = json.loads(answer.text)
            assert 0 <= found["size"] <= 99
            assert isinstance(found["is_new"], bool)
    changed = [together.ask(prompt, "plain") for prompt, kind in asked if kind == "adapted"]
    together.run()
    adapted = [answer for (_, kind), answer in zip(asked, answers, strict=True) if kind == "adapted"]
    assert [answer.tokens for answer in changed] != [answer.tokens for answer in adapted]


def test_a_second_request_reuses_the_prefix_and_gets_the_same_tokens(make: Any) -> None:
    engine, prompt = make(), prompts(1, seed=4)[0] * 8
    first, second = (engine.generate(prompt[:80], max_new_tokens=12).tokens for _ in range(2))
    assert engine.engine.stats.cached_prompt_tokens > 0
    assert first == second


def test_drafts_change_no_token(make: Any) -> None:
    plain, drafting = make(), make()
    drafting.engine.speculate(Speculation(4, GivenStepTimes(0.0)))
    repeated = [(prompt[:20] * 3)[:50] for prompt in prompts(6)]
    tokens = []
    for engine in (plain, drafting):
        answers = [engine.add(prompt, max_new_tokens=40)[1] for prompt in repeated]
        engine.run()
        tokens.append([answer.tokens for answer in answers])
    assert tokens[0] == tokens[1]
    assert drafting.engine.stats.accepted_tokens > 0


def test_a_static_batch_answers_as_each_request_alone(load_task: LoadTask) -> None:
    handler, _ = load_task("text-generation", dtype="fp32", quantize="q8_0", activation_dtype="int8")
    texts, parameters = ["hello", "a", "the quick brown fox"], {"max_new_tokens": 8}
    together = ask(handler, {"inputs": texts, "parameters": parameters})
    alone = [ask(handler, {"inputs": text, "parameters": parameters})[0] for text in texts]
    assert together == alone
