"""Speculative decoding changes how many steps a request takes, and no token of its answer."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_helpers import read_adapter, save_adapter
from rolling_batch_helpers import Engine, GivenStepTimes, Received, prompts
from tiny_models import CONTEXT, tiny_model

from handlers.rolling_batch.runner.model_runner import ModelRunner
from handlers.rolling_batch.sampling.state import SamplingState
from handlers.rolling_batch.schedule.plan import Sequence
from handlers.rolling_batch.speculation.draft_model import DraftModel, StepCosts
from handlers.rolling_batch.speculation.drafting import PromptLookup, Speculation, worthwhile_length
from lmi_server.contract.generation import SamplingParameters

pytestmark = pytest.mark.slow


class Tiles:
    """Times of steps that compute tiles of four rows: 10 ms, and 7 ms for each tile."""

    def __call__(self, rows: int) -> float:
        return 0.010 + 0.007 * -(-rows // 4)

    def knows(self, rows: int) -> bool:
        return True

    def observe(self, rows: int, seconds: float) -> None:
        pass


def speculating(model: Any, length: int = 4, row_share: float = 0.05, **limits: Any) -> Engine:
    engine = Engine(model, **limits)
    engine.engine.speculate(Speculation(length, GivenStepTimes(row_share)))
    return engine


def test_a_draft_is_what_followed_the_longest_and_newest_match() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 2, 3, 6, 7, 1, 2, 3]
    lookup = PromptLookup(3)
    assert lookup.propose(tokens) == [4, 5, 9]  # three tokens match; with two, [6, 7, 1] would
    assert lookup.propose([*tokens, 8, 2, 3]) == [8, 2, 3]
    assert lookup.propose([*tokens, 8, 2, 3, 60, 61]) == []


def test_a_sequence_learns_from_what_comes_whether_its_drafts_are_right_also_if_they_are_not_computed() -> None:
    lookup, tokens = PromptLookup(4), [1, 2, 3, 4]
    chances = []
    for token in [1, 2, 3, 4] * 4:
        lookup.propose(tokens)
        chances.append(lookup.acceptance.chance)
        tokens.append(token)
    assert chances[:3] == [0.5] * 3  # the words are new, so that there is no draft
    assert chances[3:] == sorted(chances[3:])
    assert chances[-1] > 0.9
    expected = lookup.propose(tokens)
    lookup.propose([*tokens, expected[0] + 9])
    assert lookup.acceptance.chance < 0.75 * chances[-1] + 0.01


def test_of_several_tokens_that_come_at_once_those_behind_the_first_wrong_one_say_nothing() -> None:
    chances = []
    for come in ([1, 2, 9, 4], [1, 2, 9, 9]):
        lookup, tokens = PromptLookup(4), [1, 2, 3, 4, 1, 2, 3, 4]
        assert lookup.propose(tokens) == [1, 2, 3, 4]
        lookup.propose([*tokens, *come])
        chances.append(lookup.acceptance.chance)
    assert chances[0] == chances[1]
    assert 0.5 < chances[0] < 0.7  # two were right, one was wrong


def test_a_step_gets_as_many_drafted_tokens_as_make_it_generate_most_per_second() -> None:
    chances = [0.8**size for size in range(1, 9)]
    # One tile has 1 + 0.8 + 0.64 + 0.51 tokens in 17 ms, which is 174 per second; two tiles have 4.16 in 24 ms, 173.
    assert worthwhile_length(chances, 1, Tiles()) == 3
    assert worthwhile_length([0.95**size for size in range(1, 9)], 1, Tiles()) == 7
    assert worthwhile_length([], 1, Tiles()) == 0


def test_a_batch_that_fills_its_tiles_gets_no_drafts_unless_nearly_all_of_them_are_right() -> None:
    assert worthwhile_length([0.8] * 8, 8, Tiles()) == 0
    assert worthwhile_length([0.8] * 1, 7, Tiles()) == 1  # a free row of the tile
    assert worthwhile_length([0.5] * 3, 8, GivenStepTimes(0.0)) == 3  # of a device on which rows take no time
    assert worthwhile_length([0.01] * 8, 8, GivenStepTimes(0.0)) == 0  # no gain worth having


def test_the_drafts_of_a_batch_go_to_the_sequences_whose_drafts_are_right() -> None:
    speculation = Speculation(4, Tiles())
    entries = wrong, right = [Sequence(number, [1, 2, 3, 4] * 2, 8, 100) for number in range(2)]
    for entry in entries:
        speculation.add(entry.number, SamplingState(SamplingParameters(), entry.tokens))
    for place in range(12):
        drafts = speculation.propose([(entry, 50) for entry in entries], 2, 100)
        wrong.tokens.append((3, 1, 4, 2)[place % 4] if place % 3 else 7)
        right.tokens.append(1 + place % 4)
    assert {entry: len(draft) for entry, draft in drafts.items()} == {right: 2}
    assert speculation.propose([(right, 1)], 1, 100)[right] == [1]  # one more token may be generated
    assert speculation.propose([(right, 50)], 1, 0) == {}  # no room in the KV cache


def run_mixed(engine: Engine, adapter: Any = None) -> list[Received]:
    """Requests of every kind in one batch; each prompt repeats itself, so that there is something to look up."""
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.3},
        {"do_sample": True, "temperature": 0.7, "seed": 5},
        {"do_sample": True, "top_k": 3, "seed": 6, "frequency_penalty": 0.3},
        {"logprobs": 2, "stop": ("a", "q")},
        {"min_tokens": 8, "bad_words": ("e",)},
        {"ignore_eos": True},
        {"do_sample": True, "seed": 7, "allowed_token_ids": (1, 2, 3), "repetition_penalty": 1.1},
    ]
    answers = []
    for index, prompt in enumerate(prompts(24)):
        parameters = {"max_new_tokens": 1 + 6 * (index % 5), **kinds[index % len(kinds)]}
        weights = adapter if index % 3 == 1 else None
        answers.append(engine.add((prompt[:20] * 3)[:50], weights, **parameters)[1])
    engine.run()
    return answers


@pytest.mark.parametrize("family", ["llama", "gemma2_with_soft_caps"])
@pytest.mark.parametrize("limits", [{}, {"kv_tokens": 200, "conservativeness": 0.01}], ids=["room", "retraction"])
def test_answers_are_those_without_drafts(family: str, limits: dict[str, Any], tmp_path: Path) -> None:
    directory = save_adapter(tiny_model(family), tmp_path)
    engines = Engine(tiny_model(family), **limits), speculating(tiny_model(family), row_share=0.0, **limits)
    plain, drafted = (run_mixed(engine, engine.engine.load_adapter(read_adapter(str(directory)))) for engine in engines)
    for expected, answer in zip(plain, drafted, strict=True):
        assert (answer.tokens, answer.text, answer.finish_reason) == (
            expected.tokens,
            expected.text,
            expected.finish_reason,
        )
        logprobs = [token.logprob for delta in answer.deltas for token in delta.tokens if token.logprob is not None]
        assert logprobs == pytest.approx(
            [token.logprob for delta in expected.deltas for token in delta.tokens if token.logprob is not None],
            abs=1e-4,
        )
    stats, before = engines[1].engine.stats, engines[0].engine.stats
    assert stats.generated_tokens == before.generated_tokens
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert bool(stats.retracted_requests) == bool(limits)


def test_greedy_tokens_are_those_of_generate_in_fewer_steps() -> None:
    engine = speculating(tiny_model("llama"))
    with torch.no_grad():
        engine.model.lm_head.weight[97:] = 0  # few tokens are left, so that the output repeats itself
        engine.reference.lm_head.weight[97:] = 0
    prompt = [3, 4, 5, 6] * 4
    answer = engine.generate(prompt, max_new_tokens=40, ignore_eos=True)
    assert answer.tokens == engine.expected(prompt, 40)
    stats = engine.engine.stats
    assert stats.steps < 41 - stats.accepted_tokens + 2
    assert len(answer.deltas) == 40


def test_what_is_sampled_with_drafts_is_distributed_as_the_model_says() -> None:
    """Each draft is a guess of the second token; its draws are those of the model's own distribution."""
    engine = speculating(tiny_model("llama"), row_share=0.0, slots=64, kv_tokens=64 * 64)
    prompt = [7, 8, 9, 7, 8, 9, 7, 8]
    allowed = (9, 7, 30)
    sampled = {"do_sample": True, "allowed_token_ids": allowed, "max_new_tokens": 3, "ignore_eos": True}
    answers = [engine.add(prompt, seed=seed, **sampled)[1] for seed in range(600)]
    engine.run()
    seconds = [answer.tokens[1] for answer in answers if answer.tokens[0] == 9]
    with torch.inference_mode():
        logits = engine.reference(torch.tensor([[*prompt, 9]])).logits[0, -1, list(allowed)].double()
    found = torch.tensor([seconds.count(token) for token in allowed]) / len(seconds)
    assert float((found - logits.softmax(-1)).abs().sum()) / 2 < 0.08
    assert 0 < engine.engine.stats.accepted_tokens < engine.engine.stats.drafted_tokens


# --- a draft model ---

FREE = StepCosts(0.0, 0.0, 0.0)


def drafting(model: Any, draft: Any, costs: StepCosts = FREE, length: int = 4, **limits: Any) -> Engine:
    engine = Engine(model, **limits)
    runner = ModelRunner(draft, CONTEXT)
    runner.prepare(engine.scheduler.limits.max_running, CONTEXT)
    engine.engine.speculate(DraftModel(runner, length, engine.runner.vocabulary, costs))
    return engine


def disturbed(model: Any, amount: float) -> Any:
    """Return a model that often, but not always, chooses the tokens of `model`."""
    found = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter += amount * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return found


@pytest.mark.parametrize("limits", [{}, {"kv_tokens": 200, "conservativeness": 0.01}], ids=["room", "retraction"])
def test_answers_are_those_without_a_draft_model(limits: dict[str, Any], tmp_path: Path) -> None:
    directory = save_adapter(tiny_model("llama"), tmp_path)
    model = tiny_model("llama")
    engines = Engine(tiny_model("llama"), **limits), drafting(model, disturbed(model, 0.05), **limits)
    plain, drafted = (run_mixed(engine, engine.engine.load_adapter(read_adapter(str(directory)))) for engine in engines)
    for expected, answer in zip(plain, drafted, strict=True):
        assert (answer.tokens, answer.text, answer.finish_reason) == (
            expected.tokens,
            expected.text,
            expected.finish_reason,
        )
    stats = engines[1].engine.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert bool(stats.retracted_requests) == bool(limits)


@pytest.mark.parametrize("parameters", [{}, {"do_sample": True, "seed": 3}], ids=["greedy", "drawn"])
def test_a_draft_model_that_agrees_saves_four_of_five_steps(parameters: dict[str, Any]) -> None:
    model = tiny_model("llama")
    engine = drafting(model, copy.deepcopy(model))
    for prompt in prompts(6):
        engine.add(prompt, max_new_tokens=40, ignore_eos=True, **parameters)
    engine.run()
    stats = engine.engine.stats
    assert stats.accepted_tokens == stats.drafted_tokens
    assert stats.generated_tokens == 240
    assert stats.steps < 30


def test_a_draft_model_that_does_not_pay_is_left_alone() -> None:
    model = tiny_model("llama")
    slow = drafting(model, copy.deepcopy(model), StepCosts(0.01, 1.0, 0.01))
    slow.generate([1, 2, 3], max_new_tokens=30, ignore_eos=True)
    assert slow.engine.stats.drafted_tokens == 0
    wrong = drafting(tiny_model("llama"), disturbed(tiny_model("llama"), 3.0), StepCosts(0.05, 0.1, 0.01))
    wrong.generate([1, 2, 3], max_new_tokens=60, ignore_eos=True)
    assert 0 < wrong.engine.stats.drafted_tokens < 40
    costs = StepCosts(0.05, 0.3, 0.05)
    chances = [costs.min_chance(rows, rows) for rows in (1, 8, 64)]
    assert chances == sorted(chances)
    assert chances[0] == pytest.approx(0.35)
    assert chances[-1] > 1  # in a large batch no draft pays


class Checked(DraftModel):
    """Notes what its cache is taken to hold, which must be tokens that the request has."""

    def _follow(self, sequence: Sequence, drafting: set[int]) -> None:
        own = self._drafts[sequence.number].sequence
        before, computed = own.tokens, own.computed
        super()._follow(sequence, drafting)
        assert before[: own.computed] == sequence.tokens[: own.computed]
        self.dropped = self.dropped or own.computed < computed

    dropped = False


def test_what_was_drafted_and_not_chosen_is_computed_again_whenever_the_request_gets_a_draft_again() -> None:
    """While a prompt is computed there are no drafts, so that the request goes on without the draft model."""
    runner = ModelRunner(disturbed(tiny_model("llama"), 0.5), CONTEXT)
    runner.prepare(8, CONTEXT)
    engine, plain = (Engine(tiny_model("llama")) for _ in range(2))
    drafter = Checked(runner, 4, engine.runner.vocabulary, FREE)
    engine.engine.speculate(drafter)
    answer = engine.add([1, 2, 3], max_new_tokens=100, ignore_eos=True)[1]
    steps, others = itertools.count(1), iter(prompts(100, seed=3))

    def interrupt() -> None:
        if next(steps) % 4 == 0:
            engine.add(next(others), max_new_tokens=1)

    while not answer.finish_reason:
        engine.engine.step()
        interrupt()
    engine.run()
    assert drafter.dropped
    assert answer.tokens == plain.generate([1, 2, 3], max_new_tokens=100, ignore_eos=True).tokens


def test_what_is_sampled_with_a_draft_model_is_what_the_model_draws_without_it() -> None:
    """So it is distributed as the model says, as tests of the sampler show."""
    model = tiny_model("llama")
    engines = Engine(tiny_model("llama"), slots=32), drafting(model, disturbed(model, 0.4), slots=32)
    sampled = {"do_sample": True, "top_p": 0.9, "temperature": 1.5, "max_new_tokens": 6, "ignore_eos": True}
    plain, drafted = (
        [engine.add([7, 8, 9], seed=seed, **sampled)[1] for seed in range(100)] for engine in engines
    )  # fmt: skip
    for engine in engines:
        engine.run()
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert len({tuple(answer.tokens) for answer in plain}) > 20
    assert 0 < engines[1].engine.stats.accepted_tokens < engines[1].engine.stats.drafted_tokens
