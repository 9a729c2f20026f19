"""The ways to draw tokens from logits (rows, vocabulary), with one state for each row: -> (rows,) int64."""

from __future__ import annotations

import numpy as np
import torch

from handlers.cpu_kernels.arrays import as_numpy
from handlers.rolling_batch.device_arrays import upload
from handlers.rolling_batch.sampling import gumbel
from handlers.rolling_batch.sampling.state import SamplingState
from lmi_server.contract.generation import SamplingParameters


def draw_by_kernel(logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    from handlers.cpu_kernels.rows import draw_rows

    own = np.array([(entry.temperature, entry.top_p, entry.min_p) for entry in _parameters(states)], np.float32)
    temperatures, top_p, min_p = (np.ascontiguousarray(column) for column in own.T)
    drawn = np.empty(len(states), np.int64)
    draw_rows(as_numpy(logits), temperatures, _keys(states), top_p, min_p, drawn)
    return torch.from_numpy(drawn)


def draw_from_best(logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    """Draw from the best tokens of each row, sorted: as many as the greatest top_k."""
    values, ids, kept = _drawable(logits, states)
    return _draw(values.masked_fill(~kept, -torch.inf), ids, states)


def draw_typical(logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    values, ids, kept = _drawable(logits, states)
    mass = np.array([[entry.typical_p] for entry in _parameters(states)], np.float32)
    values = values.masked_fill(~kept, -torch.inf)
    typical = _typical(values.softmax(dim=-1), upload(mass, logits.device))
    return _draw(values.masked_fill(~typical, -torch.inf), ids, states)


def _draw(values: torch.Tensor, ids: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    columns = gumbel.draw(values, ids, _keys(states))
    return ids.gather(1, columns[:, None])[:, 0]


def _keys(states: list[SamplingState]) -> np.ndarray:
    return gumbel.keys_of([state.stream for state in states], [state.position for state in states])


def _parameters(states: list[SamplingState]) -> list[SamplingParameters]:
    return [state.parameters for state in states]


def _drawable(logits: torch.Tensor, states: list[SamplingState]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the greatest logits of each row by temperature, in descending order, their tokens, and which to keep.

    top_k first, then top_p of what is left, then min_p.
    """
    own, vocabulary = _parameters(states), logits.shape[-1]
    limits = np.array(
        [
            (entry.temperature, entry.top_k or np.inf, entry.top_p if entry.top_p < 1.0 else np.inf, entry.min_p)
            for entry in own
        ],
        np.float32,
    )
    temperature, top_k, top_p, min_p = upload(limits, logits.device).T[:, :, None]
    count = max(entry.top_k or vocabulary for entry in own)
    values, ids = logits.topk(count, dim=-1) if count < vocabulary else logits.sort(dim=-1, descending=True)
    values = values / temperature
    kept = torch.arange(values.shape[-1], device=logits.device)[None] < top_k
    if any(entry.top_p < 1.0 or entry.min_p > 0.0 for entry in own):
        weights = values.softmax(dim=-1) * kept
        before = weights.cumsum(-1) - weights
        kept &= (before < top_p * weights.sum(-1, keepdim=True)) & (weights >= min_p * weights[:, :1])
        kept[:, 0] = True
    return values, ids, kept


def _typical(weights: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Return the tokens with the information nearest to its expectation (Meister et al., 2022).

    Weights (rows, tokens) add up to 1; the tokens of a row have `mass` (rows, 1) in all. Those without weight are last.
    """
    surprise = -weights.clamp_min(torch.finfo(weights.dtype).tiny).log()
    entropy = (weights * surprise).sum(-1, keepdim=True)
    distance = (surprise - entropy).abs().masked_fill(weights == 0, torch.inf)
    order = distance.argsort(dim=-1, stable=True)
    sorted_weights = weights.gather(1, order)
    kept = (sorted_weights.cumsum(-1) - sorted_weights < mass) & (sorted_weights > 0)
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, order, kept)
