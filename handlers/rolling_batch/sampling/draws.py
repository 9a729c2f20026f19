"""The ways to draw tokens from logits (rows, vocabulary), with one state for each row."""

from __future__ import annotations

import numpy as np
import torch

from handlers.cpu_kernels.arrays import as_numpy
from handlers.rolling_batch.sampling import gumbel
from handlers.rolling_batch.sampling.state import SamplingState
from lmi_server.contract.generation import SamplingParameters


def draw_by_kernel(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    from handlers.cpu_kernels.rows import draw_rows

    keys = np.array([state.key for state in states], np.uint64)
    top_p = np.array([state.parameters.top_p for state in states], np.float32)
    min_p = np.array([state.parameters.min_p for state in states], np.float32)
    drawn = np.empty(len(states), np.int64)
    temperatures = np.array([state.parameters.temperature for state in states], np.float32)
    draw_rows(as_numpy(logits), temperatures, keys, top_p, min_p, drawn)
    return drawn.tolist()


def draw_from_best(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    """Draw from the best tokens of each row, sorted: as many as the greatest top_k."""
    values, ids = _best(logits, states)
    values = values / _temperatures(logits, states)
    kept = _drawable(values, [state.parameters for state in states])
    columns = gumbel.draw(values.masked_fill(~kept, -torch.inf), ids, [state.key for state in states])
    tokens: list[int] = ids[torch.arange(len(states)), columns].tolist()
    return tokens


def _best(logits: torch.Tensor, states: list[SamplingState]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the greatest logits of each row in descending order, and their tokens."""
    vocabulary = logits.shape[-1]
    count = max(state.parameters.top_k or vocabulary for state in states)
    values, ids = logits.topk(count, dim=-1) if count < vocabulary else logits.sort(dim=-1, descending=True)
    return values, ids


def _temperatures(logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    return torch.tensor([[state.parameters.temperature] for state in states], device=logits.device)


def _drawable(logits: torch.Tensor, parameters: list[SamplingParameters]) -> torch.Tensor:
    """Return which of the tokens of each row may be drawn: logits (rows, tokens) in descending order.

    top_k first, then top_p of what is left, then min_p.
    """
    limits = torch.tensor(
        [
            (entry.top_k or torch.inf, entry.top_p if entry.top_p < 1.0 else torch.inf, entry.min_p)
            for entry in parameters
        ],
        device=logits.device,
    )
    top_k, top_p, min_p = limits.T[:, :, None]
    kept = torch.arange(logits.shape[-1], device=logits.device)[None] < top_k
    if any(entry.top_p < 1.0 or entry.min_p > 0.0 for entry in parameters):
        weights = logits.softmax(dim=-1) * kept
        before = weights.cumsum(-1) - weights
        kept &= (before < top_p * weights.sum(-1, keepdim=True)) & (weights >= min_p * weights[:, :1])
        kept[:, 0] = True
    return kept


def draw_typical(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    values, ids = _best(logits / _temperatures(logits, states), states)
    kept = _drawable(values, [state.parameters for state in states])
    return [_draw_one_typical(values[row][kept[row]], ids[row][kept[row]], state) for row, state in enumerate(states)]


def _draw_one_typical(logits: torch.Tensor, ids: torch.Tensor, state: SamplingState) -> int:
    typical = _typical(logits.softmax(dim=-1), state.parameters.typical_p)
    logits, ids = logits[typical], ids[typical]
    return int(ids[gumbel.draw(logits[None], ids[None], [state.key])[0]])


def _typical(weights: torch.Tensor, mass: float) -> torch.Tensor:
    """Return the tokens whose information is nearest to its expectation, with `mass` in all (Meister et al., 2022)."""
    surprise = -weights.clamp_min(torch.finfo(weights.dtype).tiny).log()
    entropy = (weights * surprise).sum()
    order = (surprise - entropy).abs().argsort(stable=True)
    keep = int((weights[order].cumsum(0) < mass).sum()) + 1
    return order[:keep]
