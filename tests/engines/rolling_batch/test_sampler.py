"""Sampling draws what transformers' logits processors of the same parameters would leave to draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from handlers.rolling_batch.sampler import SamplingState, sample, score
from lmi_server.contract.generation import SamplingParameters


def row(vocabulary: int = 40, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(5)) * scale


def state(seed: int | None = 1, **parameters: Any) -> SamplingState:
    return SamplingState(SamplingParameters(seed=seed, **parameters), [])


def frequencies(logits: torch.Tensor, draws: int, **parameters: Any) -> torch.Tensor:
    """Return the relative frequency of each token over `draws` draws of one request."""
    drawing = state(do_sample=True, **parameters)
    counts = torch.zeros(len(logits))
    for _ in range(draws // 16):
        for chosen in sample(logits.expand(16, -1), [drawing] * 16):
            counts[chosen.token] += 1
    return counts / counts.sum()


def transformers_probabilities(logits: torch.Tensor, **parameters: Any) -> torch.Tensor:
    warpers: list[Any] = [TemperatureLogitsWarper(parameters.get("temperature", 1.0))]
    if "top_k" in parameters:
        warpers.append(TopKLogitsWarper(parameters["top_k"]))
    if "top_p" in parameters:
        warpers.append(TopPLogitsWarper(parameters["top_p"]))
    if "min_p" in parameters:
        warpers.append(MinPLogitsWarper(parameters["min_p"]))
    if "typical_p" in parameters:
        warpers.append(TypicalLogitsWarper(parameters["typical_p"]))
    return LogitsProcessorList(warpers)(None, logits[None].clone())[0].softmax(-1)


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
        {"temperature": 1.7, "top_k": 12, "top_p": 0.8},
        {"top_k": 12, "typical_p": 0.5},
        {"top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize(("vocabulary", "draws"), [(40, 4000), (5000, 1000)], ids=["small", "more than the candidates"])
def test_what_can_be_drawn_and_how_often_is_what_transformers_says(
    parameters: dict[str, Any], vocabulary: int, draws: int
) -> None:
    logits = row(vocabulary)
    expected = transformers_probabilities(logits, **parameters)
    drawn = frequencies(logits, draws, **parameters)
    assert not drawn[expected == 0].any()
    heavy = expected > 0.01
    assert torch.allclose(drawn[heavy], expected[heavy], atol=0.035)


def test_a_flat_distribution_reaches_tokens_behind_the_candidates() -> None:
    drawing = state(do_sample=True, top_p=0.99)
    logits = torch.zeros(200, 5000)
    tokens = {chosen.token for chosen in sample(logits, [drawing] * 200)}
    assert len(tokens) > 150


def test_temperature_zero_and_do_sample_false_are_greedy() -> None:
    logits = torch.stack([row(), row(), row()])
    states = [state(do_sample=True, temperature=0.0), state(), state(do_sample=True, top_k=1)]
    assert [chosen.token for chosen in sample(logits, states)] == [int(row().argmax())] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_greatest_in_every_row(dtype: torch.dtype) -> None:
    logits = torch.randn(7, 4999, generator=torch.Generator().manual_seed(2)).to(dtype)
    states = [state() for _ in range(7)]
    best = logits.float().max(dim=-1).values
    for index, chosen in enumerate(sample(logits, states)):
        assert float(logits[index, chosen.token]) == float(best[index])


def test_rows_are_independent_of_their_neighbours() -> None:
    logits = torch.stack([row(), row(scale=1.0), row()])

    def states() -> list[SamplingState]:
        return [state(3, do_sample=True), state(4, do_sample=True, top_p=0.8), state(5, do_sample=True, top_k=3)]

    together = [chosen.token for chosen in sample(logits, states())]
    alone = [sample(logits[i : i + 1], [entry])[0].token for i, entry in enumerate(states())]
    assert together == alone


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
