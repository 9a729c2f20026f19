"""Chooses the next token of every sequence of a step from its logits.

The parameters mean what transformers' logits processors of the same names mean. Each kind of work is done for the rows
that ask for it only, for all of them at once. What a request draws follows from its seed and the place in its output
(`gumbel.py`), so that a seed gives the same output in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from handlers.cpu_kernels.arrays import as_numpy
from handlers.rolling_batch.sampling.draws import draw_by_kernel, draw_from_best, draw_typical
from handlers.rolling_batch.sampling.state import SamplingState, draws_from_all

Choice = Callable[[torch.Tensor, list[SamplingState]], list[int]]
"""Chooses a token for each row of logits (rows, vocabulary), with one state per row."""

NO_TOKEN = -1
"""In place of the token of a row whose logits are not finite."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token, with `logprob` and `top` (token, log probability) if the request asks for them."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: torch.Tensor, states: list[SamplingState]) -> list[Sampled]:
    """Choose one token per row: logits (rows, vocabulary) of any float type, one state per row."""
    tokens = _choose(logits, states, _choice)
    scored = [row for row, state in enumerate(states) if state.parameters.logprobs is not None]
    result = [Sampled(token) for token in tokens]
    if scored:
        counts = [states[row].parameters.logprobs or 0 for row in scored]
        chosen = [tokens[row] for row in scored]
        scored_logits = logits if len(scored) == len(states) else logits[scored]
        for row, entry in zip(scored, score(scored_logits, chosen, counts), strict=True):
            result[row] = entry
    for row in _infinite(logits, tokens):
        result[row] = Sampled(NO_TOKEN)
    for token, state in zip(tokens, states, strict=True):  # last, so that what raises above can be called again
        state.record(token)
    return result


def foresee(logits: torch.Tensor, states: list[SamplingState], places: list[int]) -> list[int]:
    """Choose tokens as `sample` would `places[i]` tokens further, and record nothing.

    Penalties and bans do not know of the tokens in between. `logits` are (rows, vocabulary).
    """
    return _choose(logits, [state.ahead(place) for state, place in zip(states, places, strict=True)], _choice)


def _infinite(logits: torch.Tensor, tokens: list[int]) -> list[int]:
    """Return the rows whose chosen logit is NaN or infinite: of NaN no token is the greatest, infinity is."""
    if _has_kernels(logits):
        bits = as_numpy(logits)[np.arange(len(tokens)), tokens]
        # The exponent of what is not finite is all ones; numpy has no bfloat16 that it could ask.
        lost = (bits & 0x7F80) == 0x7F80 if logits.dtype == torch.bfloat16 else ~np.isfinite(bits)
        found: list[int] = lost.nonzero()[0].tolist()
        return found
    chosen = logits[torch.arange(len(tokens)), tokens]
    rows: list[int] = [] if chosen.isfinite().all() else (~chosen.isfinite()).nonzero().flatten().tolist()
    return rows


def score(logits: torch.Tensor, tokens: list[int], top: list[int]) -> list[Sampled]:
    """Return the log probability of `tokens[i]` in row i, and of its `top[i]` best alternatives.

    Log probabilities are the model's own: before temperature, penalties and truncation.
    """
    # log softmax of the few tokens that are asked for: the logit less the row's log of the sum of exponentials.
    norms = _log_sum_exp(logits)
    rows = torch.arange(len(tokens), device=logits.device)
    chosen = logits[rows, torch.tensor(tokens, device=logits.device)].float() - norms
    count = min(max(top), logits.shape[-1])
    if count == 0:
        return [Sampled(token, value) for token, value in zip(tokens, chosen.tolist(), strict=True)]
    values, ids = logits.topk(count, dim=-1)
    values = values.float() - norms[:, None]
    alternatives = [
        tuple(zip(row_ids[:own], row_values[:own], strict=True))
        for row_ids, row_values, own in zip(ids.tolist(), values.tolist(), top, strict=True)
    ]
    return [Sampled(*entry) for entry in zip(tokens, chosen.tolist(), alternatives, strict=True)]


def _choose(
    logits: torch.Tensor,
    states: list[SamplingState],
    choice_of: Callable[[torch.Tensor, SamplingState], Choice],
) -> list[int]:
    """Choose a token for each row, for all rows at once that `choice_of` gives the same choice."""
    groups: dict[Choice, list[int]] = {}
    for row, state in enumerate(states):
        groups.setdefault(choice_of(logits, state), []).append(row)
    if len(groups) == 1:
        return next(iter(groups))(logits, states)
    tokens = [0] * len(states)
    for choice, rows in groups.items():
        for row, token in zip(rows, choice(logits[rows], [states[row] for row in rows]), strict=True):
            tokens[row] = token
    return tokens


def _choice(logits: torch.Tensor, state: SamplingState) -> Choice:
    """Return how a token is chosen: by a kernel if one can, which needs no float32 copy of the vocabulary."""
    if state.plain:
        return _argmax
    if state.masked:
        return _masked_argmax
    return draw_by_kernel if state.unchanged and _has_kernels(logits) else _choose_adjusted


def _choose_adjusted(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    return _choose(_adjust(logits.to(torch.float32, copy=True), states), states, _choice_of_adjusted)


def _choice_of_adjusted(logits: torch.Tensor, state: SamplingState) -> Choice:
    parameters = state.parameters
    if parameters.greedy:
        return _greatest
    if parameters.typical_p < 1.0:
        return draw_typical
    return draw_by_kernel if logits.device.type == "cpu" and draws_from_all(parameters) else draw_from_best


def _greatest(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    ids: list[int] = logits.argmax(dim=-1).tolist()
    return ids


def _argmax(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    if not _has_kernels(logits):
        return _greatest(logits, states)
    from handlers.cpu_kernels.rows import argmax_rows

    best = np.empty(len(logits), np.int64)
    argmax_rows(as_numpy(logits), best)
    return best.tolist()


def _masked_argmax(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    masks = _masks(states)
    for mask, state in zip(masks, states, strict=True):
        for token in () if state.banned is None else state.banned.now():
            mask[token // 32] &= ~np.uint32(1 << token % 32)
    if not _has_kernels(logits):
        return _greatest(logits.masked_fill(_excluded(logits, masks), -torch.inf), states)
    from handlers.cpu_kernels.rows import masked_argmax_rows

    best = np.empty(len(states), np.int64)
    masked_argmax_rows(as_numpy(logits), np.arange(len(states)), masks, best)
    return best.tolist()


def _has_kernels(logits: torch.Tensor) -> bool:
    return logits.device.type == "cpu" and logits.dtype in (torch.bfloat16, torch.float32)


def _log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """(rows, vocabulary) -> (rows,) float32."""
    if not _has_kernels(logits):
        return logits.float().logsumexp(dim=-1)
    from handlers.cpu_kernels.rows import log_sum_exp_rows

    result = np.empty(len(logits), np.float32)
    log_sum_exp_rows(as_numpy(logits), result)
    return torch.from_numpy(result)


def _masks(states: list[SamplingState]) -> np.ndarray:
    """Return the masks of the grammars of these requests: (rows, words) uint32."""
    return np.stack([state.grammar.mask for state in states if state.grammar is not None])


def _excluded(logits: torch.Tensor, masks: np.ndarray) -> torch.Tensor:
    """Return which logits (rows, vocabulary) the masks do not allow, on the logits' device."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little", count=logits.shape[-1])
    return torch.from_numpy(bits == 0).to(logits.device)


def _exclude(logits: torch.Tensor, rows: list[int], states: list[SamplingState]) -> None:
    """Set what the grammars of these rows do not allow to minus infinity, in place: float32 (all rows, vocabulary)."""
    masks = _masks([states[row] for row in rows])
    if not _has_kernels(logits):
        logits[rows] = logits[rows].masked_fill(_excluded(logits, masks), -torch.inf)
        return
    from handlers.cpu_kernels.rows import mask_rows

    mask_rows(as_numpy(logits), np.array(rows), masks)


def _adjust(logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    """Apply penalties, biases and grammars to float32 logits (rows, vocabulary), in place."""
    for row, state in zip(logits, states, strict=True):
        if not state.changes_logits:
            continue
        parameters = state.parameters
        if state.seen:
            seen = state.seen_ids.to(logits.device)
            values = row[seen]
            penalty = parameters.repetition_penalty
            row[seen] = torch.where(values < 0, values * penalty, values / penalty)
        if state.generated:
            ids = torch.tensor(list(state.generated), device=logits.device)
            counts = torch.tensor(list(state.generated.values()), device=logits.device)
            row[ids] -= parameters.presence_penalty + parameters.frequency_penalty * counts
        if parameters.logit_bias:
            row[state.bias_ids.to(logits.device)] += state.biases.to(logits.device)
        if state.banned is not None:
            state.banned.mask(row)
    constrained = [row for row, state in enumerate(states) if state.grammar is not None]
    if constrained:
        _exclude(logits, constrained, states)
    return logits
