"""Sampling draws what transformers' logits processors of the same parameters would leave to draw."""

from __future__ import annotations

from itertools import pairwise
from operator import eq
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from handlers.cpu_kernels.arguments import NO_TOKEN
from handlers.rolling_batch.sampling.gumbel import noise
from handlers.rolling_batch.sampling.sampler import sample, score
from handlers.rolling_batch.sampling.state import SamplingState
from lmi_server.contract.generation import SamplingParameters

PROMPT = [0, 3, 17, 18, 19, 39]


def row(vocabulary: int = 40, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(5)) * scale


def state(seed: int | None = 1, **parameters: Any) -> SamplingState:
    return SamplingState(SamplingParameters(seed=seed, **parameters), PROMPT)


def drawn(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    return [chosen.token for chosen in sample(logits.expand(len(states), -1), states)]


def frequencies(logits: torch.Tensor, draws: int, **parameters: Any) -> torch.Tensor:
    """Return the relative frequency of each token over the draws of seeds 0, 1, 2 and so on."""
    tokens = drawn(logits, [state(seed, do_sample=True, **parameters) for seed in range(draws)])
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / draws


def transformers_probabilities(logits: torch.Tensor, **parameters: Any) -> torch.Tensor:
    warpers: list[Any] = []
    if "repetition_penalty" in parameters:
        warpers.append(RepetitionPenaltyLogitsProcessor(parameters["repetition_penalty"]))
    warpers.append(TemperatureLogitsWarper(parameters.get("temperature", 1.0)))
    if "top_k" in parameters:
        warpers.append(TopKLogitsWarper(parameters["top_k"]))
    if "top_p" in parameters:
        warpers.append(TopPLogitsWarper(parameters["top_p"]))
    if "min_p" in parameters:
        warpers.append(MinPLogitsWarper(parameters["min_p"]))
    if "typical_p" in parameters:
        warpers.append(TypicalLogitsWarper(parameters["typical_p"]))
    return LogitsProcessorList(warpers)(torch.tensor([PROMPT]), logits[None].clone())[0].softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"typical_p": 0.6},
        {"repetition_penalty": 1.5},
        {"temperature": 1.7, "top_k": 12, "top_p": 0.8},
        {"top_k": 12, "typical_p": 0.5},
        {"top_p": 0.9, "min_p": 0.05},
        {"top_k": 8, "min_p": 0.1, "repetition_penalty": 0.7},
    ],
    ids=str,
)
@pytest.mark.parametrize(("vocabulary", "draws"), [(40, 6000), (5000, 1500)], ids=["small", "large"])
def test_what_can_be_drawn_and_how_often_is_what_transformers_says(
    parameters: dict[str, Any], vocabulary: int, draws: int
) -> None:
    logits = row(vocabulary)
    expected = transformers_probabilities(logits, **parameters)
    found = frequencies(logits, draws, **parameters)
    assert not found[expected == 0].any()
    assert_drawn_from(expected, found, draws)


def assert_drawn_from(expected: torch.Tensor, found: torch.Tensor, draws: int) -> None:
    """Pearson's chi-square test; tokens that are expected fewer than five times count as one."""
    often = expected * draws >= 5
    expected = torch.cat((expected[often], expected[~often].sum()[None])).double() * draws
    found = torch.cat((found[often], found[~often].sum()[None])).double() * draws
    parts = (found - expected)[expected > 0] ** 2 / expected[expected > 0]
    degrees = max(len(parts) - 1, 1)
    assert float(parts.sum()) < degrees + 4 * (2 * degrees) ** 0.5  # four standard deviations above the mean


@pytest.mark.slow
def test_presence_and_frequency_penalties_change_what_is_drawn_by_their_definition() -> None:
    logits, output = row(), [1, 1, 1, 5, 9]
    states = [state(seed, do_sample=True, presence_penalty=0.7, frequency_penalty=0.4) for seed in range(6000)]
    for entry in states:
        for token in output:
            entry.record(token)
    counts = torch.bincount(torch.tensor(output), minlength=len(logits))
    expected = (logits - 0.7 * (counts > 0) - 0.4 * counts).softmax(-1)
    found = torch.bincount(torch.tensor(drawn(logits, states)), minlength=len(logits)) / len(states)
    assert_drawn_from(expected, found, len(states))


@pytest.mark.parametrize("parameters", [{}, {"top_k": 20}, {"top_p": 0.9}], ids=str)
def test_the_tokens_of_one_seed_are_independent_of_each_other(parameters: dict[str, Any]) -> None:
    logits, drawing = row(), state(3, do_sample=True, **parameters)
    tokens = [sample(logits[None], [drawing])[0].token for _ in range(3000)]
    expected = transformers_probabilities(logits, **parameters)
    assert_drawn_from(expected, torch.bincount(torch.tensor(tokens), minlength=len(logits)) / len(tokens), len(tokens))
    best = int(expected.argmax())
    after = torch.tensor([second for first, second in pairwise(tokens) if first == best])
    assert_drawn_from(expected, torch.bincount(after, minlength=len(logits)) / len(after), len(after))


@pytest.mark.slow
@pytest.mark.parametrize("parameters", [{}, {"top_k": 50}, {"top_p": 0.9}, {"typical_p": 0.9}], ids=str)
def test_a_seed_draws_the_same_token_from_logits_that_are_rounded_otherwise(parameters: dict[str, Any]) -> None:
    logits = row(5000)
    rounded = (logits * 1.002).bfloat16()

    def states() -> list[SamplingState]:
        return [state(seed, do_sample=True, **parameters) for seed in range(500)]

    same = sum(map(eq, drawn(logits, states()), drawn(rounded, states())))
    assert same >= 480  # a search in cumulative sums finds another token for one in ten


def test_kernels_draw_with_the_noise_that_other_devices_draw_with() -> None:
    logits = torch.randn(200, 3000, generator=torch.Generator().manual_seed(6)) * 2
    states = [state(seed, do_sample=True) for seed in range(200)]
    keys = torch.tensor([entry.key - 2**64 if entry.key >= 2**63 else entry.key for entry in states])
    expected = (logits + noise(keys, torch.arange(3000)[None])).argmax(-1).tolist()
    assert [chosen.token for chosen in sample(logits, states)] == expected
    top = [state(seed, do_sample=True, top_k=3000) for seed in range(200)]
    assert [chosen.token for chosen in sample(logits, top)] == expected


def test_a_flat_distribution_reaches_every_part_of_the_vocabulary() -> None:
    tokens = set(drawn(torch.zeros(5000), [state(seed, do_sample=True, top_p=0.99) for seed in range(200)]))
    assert len(tokens) > 150


def test_seeds_may_be_any_integers() -> None:
    seeds = [-1, 0, 1, 2**31, 2**63, 2**64 - 2]
    assert len(set(drawn(torch.zeros(5000), [state(seed, do_sample=True) for seed in seeds]))) == len(seeds)


def test_temperature_zero_and_do_sample_false_are_greedy() -> None:
    logits = torch.stack([row(), row(), row()])
    states = [state(do_sample=True, temperature=0.0), state(), state(do_sample=True, top_k=1)]
    assert [chosen.token for chosen in sample(logits, states)] == [int(row().argmax())] * 3


@pytest.mark.parametrize("vocabulary", [4999, 24_577])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_greatest_in_every_row(dtype: torch.dtype, vocabulary: int) -> None:
    logits = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(2)).to(dtype)
    states = [state() for _ in range(7)]
    best = logits.float().max(dim=-1).values
    for index, chosen in enumerate(sample(logits, states)):
        assert float(logits[index, chosen.token]) == float(best[index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_equals_wherever_they_are(dtype: torch.dtype) -> None:
    """Kernels divide a long row."""
    logits = torch.full((5, 30_000), -torch.inf, dtype=dtype)
    for index, greatest in enumerate([(0,), (29_999, 8191), (8192, 8191, 20_000), (12_345, 25_000)]):
        logits[index, list(greatest)] = 2.0
        logits[index, 9000] = max(float(logits[index, 9000]), -3.0)
    logits[4, 0] = torch.nan
    logits[4, 20_000] = 1.0
    chosen = [sampled.token for sampled in sample(logits, [state() for _ in range(5)])]
    assert chosen[:4] == [0, 8191, 8191, 12_345]
    assert chosen[4] in (NO_TOKEN, 20_000)


def test_rows_are_independent_of_their_neighbours() -> None:
    logits = torch.stack([row(), row(scale=1.0), row()])

    def states() -> list[SamplingState]:
        return [state(3, do_sample=True), state(4, do_sample=True, top_p=0.8), state(5, do_sample=True, top_k=3)]

    together = [chosen.token for chosen in sample(logits, states())]
    alone = [sample(logits[i : i + 1], [entry])[0].token for i, entry in enumerate(states())]
    assert together == alone


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("some", [slice(None), slice(3, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_without_numbers_ends_and_leaves_its_neighbours_alone(
    broken: float, some: slice, dtype: torch.dtype
) -> None:
    logits = torch.stack([row(), row(), row()]).to(dtype)
    logits[1, some] = broken
    parameters = {"do_sample": True, "temperature": 0.7, "top_p": 0.6}
    tokens = [chosen.token for chosen in sample(logits, [state(seed, **parameters) for seed in range(3)])]
    alone = [drawn(row().to(dtype), [state(seed, **parameters)])[0] for seed in (0, 2)]
    assert [tokens[0], tokens[2]] == alone
    assert NO_TOKEN <= tokens[1] < 40  # NO_TOKEN: the request ends with an error


def test_bfloat16_logits_draw_what_their_float32_values_draw() -> None:
    """Rows of all kinds stand beside each other, of which only some are converted."""
    kinds: list[dict[str, Any]] = [{}, {"do_sample": False}, {"temperature": 0.3}, {"repetition_penalty": 1.5}]
    kinds += [{"top_k": 20}, {"top_p": 0.6}, {"min_p": 0.1}, {"logit_bias": {7: 3.0}}, {"typical_p": 0.5}]
    logits = torch.randn(12 * len(kinds), 5003, generator=torch.Generator().manual_seed(6)).bfloat16() * 2

    def tokens(of_type: torch.Tensor) -> list[int]:
        states = [state(seed, **{"do_sample": True} | kinds[seed % len(kinds)]) for seed in range(len(logits))]
        return [chosen.token for chosen in sample(of_type, states)]

    found = tokens(logits)
    assert found == tokens(logits.float())
    assert found != tokens(logits.flip(0))


def test_presence_and_frequency_penalties_lower_what_was_generated() -> None:
    logits = torch.tensor([[3.0, 2.5, 0.0]])
    present = state(presence_penalty=0.4)
    assert [sample(logits, [present])[0].token for _ in range(3)] == [0, 0, 0]
    frequent = state(frequency_penalty=0.4)
    assert [sample(logits, [frequent])[0].token for _ in range(4)] == [0, 0, 1, 0]


def test_logit_bias_forces_and_forbids() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    assert sample(logits, [state(logit_bias={2: 100.0})])[0].token == 2
    assert sample(logits, [state(logit_bias={0: -100.0})])[0].token == 1


def test_the_repetition_penalty_covers_prompt_and_output() -> None:
    penalised = SamplingState(SamplingParameters(repetition_penalty=2.0), [0])
    logits = torch.tensor([[3.0, 2.0, 1.8]])
    assert [sample(logits, [penalised])[0].token for _ in range(2)] == [1, 2]


def test_log_probabilities_are_reported_only_on_request() -> None:
    logits = torch.stack([row()] * 3)
    chosen = sample(logits, [state(), state(logprobs=0), state(logprobs=2)])
    exact = row().log_softmax(-1)
    assert chosen[0].logprob is None
    assert chosen[1].logprob == pytest.approx(float(exact.max()), abs=1e-5)
    assert chosen[1].top == ()
    assert [token for token, _ in chosen[2].top] == exact.topk(2).indices.tolist()


def test_score_gives_the_log_probability_of_given_tokens() -> None:
    exact = row().log_softmax(-1)
    scored = score(torch.stack([row(), row()]), [3, 7], [0, 1])
    assert [entry.logprob for entry in scored] == pytest.approx([float(exact[3]), float(exact[7])], abs=1e-5)
    assert len(scored[0].top) == 0
    assert len(scored[1].top) == 1


def test_without_a_seed_requests_differ() -> None:
    logits = torch.zeros(64, 1000)
    tokens = [chosen.token for chosen in sample(logits, [state(None, do_sample=True) for _ in range(64)])]
    assert len(set(tokens)) > 32
