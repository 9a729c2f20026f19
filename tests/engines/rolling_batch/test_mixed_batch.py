"""In float32 every request gets the tokens of `generate`, whatever else is in its batch, and however often it moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_helpers import read_adapter, save_adapter, with_adapter
from rolling_batch_helpers import EOS, Engine, GivenStepTimes, Received, generated, generated_like, prompts
from tiny_models import tiny_model

from handlers.chats.required import call_constraint
from handlers.rolling_batch.speculation.drafting import Speculation
from handlers.structured_output.grammar_text import grammar_text
from handlers.structured_output.token_grammars import CompiledGrammar, GrammarMatch, TokenGrammars
from lmi_server.contract.generation import (
    ChatOptions,
    GenerationRequest,
    NamedTool,
    SamplingParameters,
    StructuredOutputs,
)

pytestmark = pytest.mark.slow

TOKENS = 24
_SIZE = {
    "type": "object",
    "properties": {"n": {"enum": [1, 23, 456]}},
    "required": ["n"],
    "additionalProperties": False,
}
_TOOLS = [{"type": "function", "function": {"name": name, "parameters": _SIZE}} for name in ("grow", "cut")]


def forced(choice: Any) -> StructuredOutputs:
    """Return the constraint of a request that has to call a tool."""
    chat = ChatOptions(tool_choice=choice, parallel_tool_calls=False)
    asked = GenerationRequest(request_id="", prompt=None, tools=_TOOLS, chat=chat, sampling=SamplingParameters())
    found = call_constraint(asked).sampling.structured_outputs
    assert found is not None
    return found


CONSTRAINTS: tuple[StructuredOutputs | None, ...] = (
    None,
    StructuredOutputs(kind="regex", value="[0-9]{20}"),
    None,
    forced("required"),
    forced(NamedTool("cut")),
    StructuredOutputs(kind="json", value={"enum": ["red", "green", "blue"]}),
)


class Mixed(Engine):
    """A rolling batch with speculation whose cache is too small for what it is asked."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, slots=8, kv_tokens=260, conservativeness=0.05)
        self.engine.speculate(Speculation(4, GivenStepTimes(0.0)))
        grammars = TokenGrammars(self.tokenizer, self.engine.vocabulary, [EOS])
        self.grammars = [one and grammars.compile(grammar_text(one)) for one in CONSTRAINTS]

    def ask(self, prompt: list[int], adapter: Any, grammar: CompiledGrammar | None) -> Received:
        answer = Received()
        match = None if grammar is None else GrammarMatch(grammar)
        parameters = SamplingParameters(max_new_tokens=TOKENS)
        self.engine.add("label", prompt, parameters, "", 3, answer.take, adapter, grammar=match)
        return answer


def constrained(engine: Engine, model: Any, prompt: list[int], grammar: CompiledGrammar) -> list[int]:
    """Return what `generate` of transformers chooses among the tokens that the grammar allows."""

    def allowed(_: int, tokens: torch.Tensor) -> list[int]:
        match = GrammarMatch(grammar)
        for token in tokens[len(prompt) :].tolist():
            match.accept(token)
        if match.is_complete:
            return [EOS]
        match.fill()
        return [token for token in range(engine.engine.vocabulary) if match.mask[token // 32] >> (token % 32) & 1]

    return generated(model, prompt, TOKENS, prefix_allowed_tokens_fn=allowed)


def test_grammars_forced_calls_drafts_adapters_and_retraction_in_one_batch(tmp_path: Path) -> None:
    model = tiny_model("llama")
    directory = save_adapter(model, tmp_path)
    adapted = with_adapter(model, directory)
    with torch.no_grad():  # few tokens are left where nothing constrains them, so that outputs repeat themselves
        for entry in (model, adapted.get_base_model()):
            entry.lm_head.weight[180:256] *= 0.2
    engine = Mixed(model)
    weights = engine.engine.load_adapter(read_adapter(str(directory)))
    asked = [
        ((prompt[:10] * 3)[:30], index % 4 == 3, engine.grammars[index % len(CONSTRAINTS)])
        for index, prompt in enumerate(prompts(36))
    ]
    answers = [engine.ask(prompt, weights if with_it else None, grammar) for prompt, with_it, grammar in asked]
    engine.run()
    for (prompt, with_it, grammar), answer in zip(asked, answers, strict=True):
        reference = adapted if with_it else engine.reference
        if grammar is None:
            assert answer.tokens == generated_like(reference, prompt, answer.tokens, TOKENS)
            continue
        expected = constrained(engine, reference, prompt, grammar)
        assert answer.tokens == expected[: len(answer.tokens)]
        assert expected[len(answer.tokens) :] in ([], [EOS])  # the rolling batch ends where nothing else can follow
    stats = engine.engine.stats
    assert stats.retracted_requests
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
