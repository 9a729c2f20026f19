"""Grammars in the rolling batch: a mask for each row that has one, and nothing else for the other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rolling_batch_helpers import EOS, Engine, Received, generated, prompts
from tiny_models import tiny_model

from handlers.rolling_batch.sampling.sampler import sample
from handlers.rolling_batch.sampling.state import BannedTokens, SamplingState
from handlers.structured_output.grammar_text import grammar_text
from handlers.structured_output.token_grammars import GrammarMatch, TokenGrammars
from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import SamplingParameters, StructuredOutputs

pytestmark = pytest.mark.slow


class Constrained(Engine):
    """A rolling batch whose requests may have a grammar."""

    def match(self, kind: Any, value: Any) -> GrammarMatch:
        grammars = TokenGrammars(self.tokenizer, self.engine.vocabulary, [EOS])
        return GrammarMatch(grammars.compile(grammar_text(StructuredOutputs(kind=kind, value=value))))

    def ask(self, prompt: list[int], kind: Any, value: Any, **parameters: Any) -> Received:
        answer = Received()
        asked = SamplingParameters(**{"max_new_tokens": 40, **parameters})
        grammar = self.match(kind, value)
        self.engine.add("label", prompt, asked, "", 3, answer.take, grammar=grammar)
        return answer


@pytest.fixture(scope="module")
def engine() -> Constrained:
    return Constrained(tiny_model("llama"))


def test_rows_without_a_grammar_stay_exact_beside_rows_with_one(engine: Constrained) -> None:
    alone = Constrained(tiny_model("llama"), slots=8, kv_tokens=160, conservativeness=0.1)  # some are retracted
    asked = prompts(6)
    free = [alone.add(prompt, max_new_tokens=30)[1] for prompt in asked[:3]]
    digits = [alone.ask(prompt, "regex", "[0-9]{30}") for prompt in asked]
    drawn = alone.ask(asked[0], "regex", "[a-f]{20}", do_sample=True, seed=7, temperature=2.0)
    alone.run()
    for prompt, answer in zip(asked, free, strict=False):
        assert answer.tokens == generated(alone.reference, prompt, 30)
    for prompt, answer in zip(asked, digits, strict=True):
        # What transformers generates if it may only choose digits.
        chosen = alone.reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=30, do_sample=False,
            prefix_allowed_tokens_fn=lambda *_: alone.tokenizer.encode("0123456789"), pad_token_id=0,
        )  # fmt: skip
        assert answer.tokens == chosen[0, len(prompt) :].tolist()
        assert answer.finish_reason == "eos_token"
    assert alone.engine.stats.retracted_requests
    repeated = engine.ask(asked[0], "regex", "[a-f]{20}", do_sample=True, seed=7, temperature=2.0)
    engine.run()
    assert (repeated.text, len(drawn.text)) == (drawn.text, 20)


def test_what_ends_a_sequence_ends_a_constrained_one(engine: Constrained) -> None:
    def text(value: str, **parameters: Any) -> tuple[str, str | None]:
        answer = engine.ask([1, 2, 3], "regex", value, **parameters)
        engine.run()
        return answer.text, answer.finish_reason

    assert text("[0-9]{4}", logit_bias={EOS: 100.0}) == (text("[0-9]{4}")[0], "eos_token")
    assert text("[0-9]{2,6}", logit_bias={EOS: 100.0})[0] == text("[0-9]{2}")[0]
    assert len(text("[0-9]{2,6}", logit_bias={EOS: 100.0}, min_tokens=4)[0]) == 4
    assert len(text("[0-9]{2,6}", logit_bias={EOS: 100.0}, ignore_eos=True)[0]) == 6
    assert text("[0-9]{9}", max_new_tokens=3)[1] == "length"
    assert text("ab;cd", stop=(";",)) == ("ab", "stop_sequence")


def test_log_probabilities_are_those_of_the_model(engine: Constrained) -> None:
    answer = engine.ask([1, 2, 3], "choice", ["zebra"], logprobs=2)
    engine.run()
    logits = engine.reference(torch.tensor([[1, 2, 3]])).logits[0, -1].detach().log_softmax(-1)
    first = answer.deltas[0].tokens[0]
    assert first.logprob == pytest.approx(float(logits[first.id]), abs=1e-4)
    assert first.top[0].id == int(logits.argmax())


def test_a_request_that_leaves_no_token_ends_alone(engine: Constrained) -> None:
    none = engine.ask([1, 2, 3], "choice", ["a"], bad_words=("a",))
    fine = engine.ask([1, 2, 3], "choice", ["a"])
    engine.run()
    assert isinstance(none.error, RequestError)
    assert "no token is left" in str(none.error)
    assert (fine.text, engine.engine.has_work) == ("a", False)


def test_a_grammar_that_becomes_too_complex_ends_alone(engine: Constrained) -> None:
    several = " ".join(["x?"] * 600)
    answer = engine.ask([1, 2, 3], "grammar", f'start: "go" {several}\nx: "a" | "b"')
    fine = engine.ask([1, 2, 3], "choice", ["yes"])
    engine.run()
    assert answer.finish_reason or "too complex" in str(answer.error)
    assert fine.text == "yes"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_masks_select(dtype: torch.dtype) -> None:
    """They hold whatever the logits are, and leave the logits of other rows as they are."""
    chance = torch.Generator().manual_seed(3)
    vocabulary = 32 * 5 + 7
    logits = torch.randn(4, vocabulary, generator=chance).to(dtype)
    logits[1, 3] = float("inf")
    allowed = torch.rand(4, vocabulary, generator=chance) < 0.3
    allowed[:, 32:64], allowed[:, 64:96], allowed[1, 3] = True, False, False

    class Mask:
        def __init__(self, row: torch.Tensor) -> None:
            bits = np.packbits(row.numpy(), bitorder="little")
            self.mask = np.zeros((vocabulary + 31) // 32, np.uint32)
            self.mask.view(np.uint8)[: len(bits)] = bits

    parameters: list[dict[str, Any]] = [{}, {}, {"logit_bias": {40: 0.5}}, {"do_sample": True, "seed": 1, "top_k": 1}]
    asked = [SamplingParameters(**one) for one in parameters]
    states = [SamplingState(one, [], grammar=Mask(row)) for one, row in zip(asked, allowed, strict=True)]
    states.append(SamplingState(SamplingParameters(), []))
    best, second = logits[0].float().masked_fill(~allowed[0], -torch.inf).topk(2).indices.tolist()
    banned = BannedTokens(None, [[best], [best, second]], ends=[second], min_tokens=0)
    states.append(SamplingState(SamplingParameters(), [], banned, Mask(allowed[0])))
    rows = torch.cat((logits, logits[:1], logits[:1]))
    chosen = [sampled.token for sampled in sample(rows, states)]
    biased = logits.float()
    biased[2, 40] += 0.5
    assert chosen[:4] == biased.masked_fill(~allowed, -torch.inf).argmax(-1).tolist()
    assert chosen[4:] == [int(logits[0].argmax()), second]
