"""Chooses the next token of every sequence of a step from its logits.

The parameters mean what transformers' logits processors of the same names mean. Each kind of work is done for the rows
that ask for it only, for all of them at once. The draws of a request follow from its seed and the place in its output
(`gumbel.py`): a seed gives the same output in any batch.

Nothing here waits for the device: `choose` returns tokens that are still on it (`chosen.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from handlers.cpu_kernels.arguments import NO_TOKEN
from handlers.cpu_kernels.arrays import as_numpy
from handlers.rolling_batch.device_arrays import Download, unknown_token, upload
from handlers.rolling_batch.sampling.chosen import Chosen, Sampled, Scores
from handlers.rolling_batch.sampling.draws import draw_by_kernel, draw_from_best, draw_typical
from handlers.rolling_batch.sampling.histories import DeviceHistories
from handlers.rolling_batch.sampling.penalties import penalise
from handlers.rolling_batch.sampling.state import SamplingState, draws_from_all

Choice = Callable[[torch.Tensor, list[SamplingState]], torch.Tensor]
"""Chooses a token for each row of logits (rows, vocabulary), with one state per row: (rows,) int64."""


def choose(
    logits: torch.Tensor,
    states: list[SamplingState],
    before: torch.Tensor | None = None,
    first_row: int = 0,
    histories: DeviceHistories | None = None,
) -> Chosen:
    """Choose one token per row: logits (rows, vocabulary) of any float type, one state per row.

    `before` has the tokens of the step before, if the host does not know them yet. The states go on to the next
    position; `SamplingState.settle` tells them their tokens. `first_row` is the row of the step that comes first here.
    `histories` are kept by the caller from step to step.
    """
    if _has_kernels(logits) and all(state.takes_greatest for state in states):
        chosen = Chosen(*_greatest_by_kernel(logits))
    else:
        chosen = _chosen(logits, states, _choice(before, histories or DeviceHistories()))
    for row, state in enumerate(states, first_row):  # last: everything above can be called again after an error
        state.advance(unknown_token(row))
    return chosen


def _chosen(
    logits: torch.Tensor, states: list[SamplingState], choice_of: Callable[[torch.Tensor, SamplingState], Choice]
) -> Chosen:
    """Choose tokens in any ways, and score them."""
    tokens = _choose(logits, states, choice_of)
    scored = [row for row, state in enumerate(states) if state.parameters.logprobs is not None]
    scores = None
    if scored:
        counts = [states[row].parameters.logprobs or 0 for row in scored]
        every = len(scored) == len(states)
        rows = None if every else upload(scored, logits.device)
        scores = _scores(logits if rows is None else logits[rows], tokens if rows is None else tokens[rows], counts)
    return Chosen(tokens, _told(logits, tokens), scores, scored)


def sample(logits: torch.Tensor, states: list[SamplingState]) -> list[Sampled]:
    """Choose one token per row, and wait for it."""
    result = choose(logits, states).read()
    for sampled, state in zip(result, states, strict=True):
        state.settle(sampled.token)
    return result


def foresee(logits: torch.Tensor, states: list[SamplingState], places: list[int]) -> list[int]:
    """Choose tokens as `sample` would `places[i]` tokens further, and record nothing.

    Penalties and bans do not know of the tokens in between. `logits` are (rows, vocabulary).
    """
    ahead = [state.ahead(place) for state, place in zip(states, places, strict=True)]
    tokens: list[int] = _choose(logits, ahead, _choice(None, DeviceHistories())).tolist()
    return tokens


def _told(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the tokens, NO_TOKEN where the logit is not finite: of NaN no token is the greatest, infinity is."""
    if not _has_kernels(logits):
        finite = logits.gather(1, tokens[:, None])[:, 0].isfinite()
        return torch.where(finite, tokens, NO_TOKEN)
    from handlers.cpu_kernels.rows import tell_tokens

    told = np.empty(len(tokens), np.int64)
    tell_tokens(as_numpy(logits), tokens.numpy(), told)
    return torch.from_numpy(told)


def score(logits: torch.Tensor, tokens: list[int], top: list[int]) -> list[Sampled]:
    """Return the log probability of `tokens[i]` in row i, and of its `top[i]` best alternatives.

    Log probabilities are the model's own: before temperature, penalties and truncation.
    """
    scores = _scores(logits, upload(np.array(tokens, np.int64), logits.device), top)
    return scores.sampled(tokens, Download(scores.tensors).read())


def _scores(logits: torch.Tensor, tokens: torch.Tensor, top: Sequence[int]) -> Scores:
    # log softmax of the few tokens that are asked for: the logit less the row's log of the sum of exponentials.
    norms = _log_sum_exp(logits)
    chosen = logits.gather(1, tokens[:, None])[:, 0].float() - norms
    count = min(max(top), logits.shape[-1])
    if count == 0:
        return Scores(chosen, None, None, top)
    values, ids = logits.topk(count, dim=-1)
    return Scores(chosen, values.float() - norms[:, None], ids, top)


def _choose(
    logits: torch.Tensor,
    states: list[SamplingState],
    choice_of: Callable[[torch.Tensor, SamplingState], Choice],
) -> torch.Tensor:
    """Choose a token for each row, for all rows at once that `choice_of` gives the same choice."""
    groups: dict[Choice, list[int]] = {}
    for row, state in enumerate(states):
        groups.setdefault(choice_of(logits, state), []).append(row)
    if len(groups) == 1:
        return next(iter(groups))(logits, states)
    tokens = torch.empty(len(states), dtype=torch.long, device=logits.device)
    for choice, rows in groups.items():
        own = upload(rows, logits.device)
        tokens[own] = choice(logits[own], [states[row] for row in rows])
    return tokens


def _choice(before: torch.Tensor | None, histories: DeviceHistories) -> Callable[[torch.Tensor, SamplingState], Choice]:
    """Return what tells how a token is chosen: if possible by a kernel, which needs no float32 copy of the logits."""

    def adjusted(logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
        copied = _adjust(logits.to(torch.float32, copy=True), states, before, histories)
        return _choose(copied, states, _choice_of_adjusted)

    def choice(logits: torch.Tensor, state: SamplingState) -> Choice:
        if state.plain:
            return _argmax
        if state.masked:
            return _masked_argmax
        return draw_by_kernel if state.unchanged and _has_kernels(logits) else adjusted

    return choice


def _choice_of_adjusted(logits: torch.Tensor, state: SamplingState) -> Choice:
    parameters = state.parameters
    if parameters.greedy:
        return _greatest
    if parameters.typical_p < 1.0:
        return draw_typical
    return draw_by_kernel if logits.device.type == "cpu" and draws_from_all(parameters) else draw_from_best


def _greatest(logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    return logits.argmax(dim=-1)


def _argmax(logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    return _greatest_by_kernel(logits)[0] if _has_kernels(logits) else _greatest(logits, states)


def _greatest_by_kernel(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the greatest token of each row, and what may be told of it."""
    from handlers.cpu_kernels.rows import argmax_rows

    best, told = np.empty(len(logits), np.int64), np.empty(len(logits), np.int64)
    argmax_rows(as_numpy(logits), best, told)
    return torch.from_numpy(best), torch.from_numpy(told)


def _masked_argmax(logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    masks = _masks(states)
    for mask, state in zip(masks, states, strict=True):
        for token in () if state.banned is None else state.banned.now():
            mask[token // 32] &= ~np.uint32(1 << token % 32)
    if not _has_kernels(logits):
        return _greatest(logits.masked_fill(_excluded(logits, masks), -torch.inf), states)
    from handlers.cpu_kernels.rows import masked_argmax_rows

    best = np.empty(len(states), np.int64)
    masked_argmax_rows(as_numpy(logits), np.arange(len(states)), masks, best)
    return torch.from_numpy(best)


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
    return upload(bits == 0, logits.device)


def _exclude(logits: torch.Tensor, rows: list[int], states: list[SamplingState]) -> None:
    """Set what the grammars of these rows do not allow to minus infinity, in place: float32 (all rows, vocabulary)."""
    masks = _masks([states[row] for row in rows])
    if not _has_kernels(logits):
        own = upload(rows, logits.device)
        logits[own] = logits[own].masked_fill(_excluded(logits, masks), -torch.inf)
        return
    from handlers.cpu_kernels.rows import mask_rows

    mask_rows(as_numpy(logits), np.array(rows), masks)


def _adjust(
    logits: torch.Tensor, states: list[SamplingState], before: torch.Tensor | None, histories: DeviceHistories
) -> torch.Tensor:
    """Apply penalties, biases and grammars to float32 logits (rows, vocabulary), in place."""
    penalise(logits, states, before, histories)
    for row, state in zip(logits.unbind(), states, strict=True):
        if state.parameters.logit_bias:
            row[upload(state.bias_ids, row.device)] += upload(state.biases, row.device)
        if state.banned is not None:
            state.banned.mask(row)
    constrained = [row for row, state in enumerate(states) if state.grammar is not None]
    if constrained:
        _exclude(logits, constrained, states)
    return logits
