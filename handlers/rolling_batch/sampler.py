"""Chooses the next token of every sequence of a step from its logits.

The parameters mean what transformers' logits processors of the same names mean. Each kind of work is done for the rows
that ask for it only, for all of them at once. What a request draws follows from its seed and the place in its output
(`gumbel.py`), so that a seed gives the same output in any batch.
"""

from __future__ import annotations

import copy
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from handlers.cpu_kernels.arrays import as_numpy
from handlers.rolling_batch import gumbel
from lmi_server.contract.generation import SamplingParameters


class BannedTokens:
    """The tokens that a request must not generate next: `allowed_token_ids`, `bad_words` and `min_tokens`.

    `words` are the token ids of the bad words. The last token of a word is banned where the output ends with the
    others. `ends` are the tokens that end a sequence; they are banned before `least` tokens.
    """

    def __init__(
        self, allowed: Sequence[int] | None, words: Sequence[Sequence[int]], ends: Iterable[int], least: int
    ) -> None:
        self.output: list[int] = []
        self._allowed = None if allowed is None else torch.tensor(allowed, dtype=torch.long)
        self._always = [word[0] for word in words if len(word) == 1]
        self._words = [(list(word[:-1]), word[-1]) for word in words if len(word) > 1]
        self._ends = list(ends)
        self._min = least
        self.few = allowed is None  # `now` names them all

    def mask(self, row: torch.Tensor) -> None:
        """Set the logits of the banned tokens to minus infinity, in place."""
        if self._allowed is not None:
            allowed = self._allowed.to(row.device)
            kept = row[allowed]
            row.fill_(-torch.inf)
            row[allowed] = kept
        row[torch.tensor(self.now(), dtype=torch.long, device=row.device)] = -torch.inf

    def now(self) -> list[int]:
        """Return the tokens that are banned next, but for those that `allowed` leaves out."""
        ends = self._ends if len(self.output) < self._min else []
        words = [last for before, last in self._words if self.output[-len(before) :] == before]
        return [*self._always, *ends, *words]


class TokenMask(Protocol):
    """The tokens that the grammar of a request allows next: `mask` has a bit per token, the lowest first, in uint32."""

    mask: np.ndarray


class SamplingState:
    """What the sampler keeps for one request: its parameters, its random numbers, the tokens seen so far.

    `plain`: the token is the argmax of the unchanged logits. `unchanged`: it is drawn from them, as the kernel can.
    `masked`: it is the argmax of those that `grammar` and `banned` allow. `banned` are the tokens that it must not
    choose.
    """

    def __init__(
        self,
        parameters: SamplingParameters,
        prompt: list[int],
        banned: BannedTokens | None = None,
        grammar: TokenMask | None = None,
    ) -> None:
        self.parameters = parameters
        self.banned = banned
        self._stream = gumbel.stream_of(secrets.randbits(64) if parameters.seed is None else parameters.seed)
        self._position = 0  # of the next token in the output
        self.grammar = grammar
        self._penalised = parameters.repetition_penalty != 1.0
        self._counted = parameters.presence_penalty != 0.0 or parameters.frequency_penalty != 0.0
        self.seen: set[int] = set(prompt) if self._penalised else set()
        self.seen_ids = torch.tensor(sorted(self.seen), dtype=torch.long)
        self.generated: Counter[int] = Counter()
        self.bias_ids = torch.tensor(list(parameters.logit_bias), dtype=torch.long)
        self.biases = torch.tensor(list(parameters.logit_bias.values()), dtype=torch.float32)
        changes_values = self._penalised or self._counted or bool(parameters.logit_bias)
        self.changes_logits = changes_values or banned is not None
        self.plain = parameters.greedy and not self.changes_logits and grammar is None
        draws = not parameters.greedy and _draws_from_all(parameters)
        self.unchanged = draws and not self.changes_logits and grammar is None
        takes_greatest = parameters.greedy and not changes_values and grammar is not None
        self.masked = takes_greatest and (banned is None or banned.few)

    @property
    def key(self) -> int:
        """The key of the noise with which the next token is drawn."""
        return gumbel.key_of(self._stream, self._position)

    def ahead(self, places: int) -> SamplingState:
        """Return a copy for the token that comes `places` tokens later."""
        later = copy.copy(self)
        later._position += places
        return later

    def record(self, token: int) -> None:
        """Go on to the next position; remember a generated token for the penalties."""
        self._position += 1
        if self._penalised and token not in self.seen:
            self.seen.add(token)
            self.seen_ids = torch.cat((self.seen_ids, torch.tensor([token])))
        if self._counted:
            self.generated[token] += 1
        if self.banned is not None:
            self.banned.output.append(token)


_Draw = Callable[[torch.Tensor, list[SamplingState]], list[int]]


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
    tokens = _choose(logits, states)
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
    return _choose(logits, [state.ahead(place) for state, place in zip(states, places, strict=True)])


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
    most = min(max(top), logits.shape[-1])
    if most == 0:
        return [Sampled(token, value) for token, value in zip(tokens, chosen.tolist(), strict=True)]
    values, ids = logits.topk(most, dim=-1)
    values = values.float() - norms[:, None]
    alternatives = [
        tuple(zip(row_ids[:count], row_values[:count], strict=True))
        for row_ids, row_values, count in zip(ids.tolist(), values.tolist(), top, strict=True)
    ]
    return [Sampled(*entry) for entry in zip(tokens, chosen.tolist(), alternatives, strict=True)]


def _choose(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    if all(state.plain for state in states):
        return _argmax(logits)
    # Rows that kernels choose from are spared the float32 copy of the vocabulary that all other sampling works on.
    plain = [row for row, state in enumerate(states) if state.plain]
    masked = [row for row, state in enumerate(states) if state.masked]
    drawn = [row for row, state in enumerate(states) if state.unchanged] if _has_kernels(logits) else []
    done = {*plain, *masked, *drawn}
    others = [row for row in range(len(states)) if row not in done]
    tokens = [0] * len(states)
    if plain:
        for row, token in zip(plain, _argmax(logits[plain]), strict=True):
            tokens[row] = token
    if masked:
        for row, token in zip(masked, _masked_argmax(logits, masked, states), strict=True):
            tokens[row] = token
    if drawn:
        part = logits if len(drawn) == len(states) else logits[drawn]
        for row, token in zip(drawn, _draw_by_kernel(part, [states[row] for row in drawn]), strict=True):
            tokens[row] = token
    if not others:
        return tokens
    adjusted = _adjusted(logits[others].float(), [states[row] for row in others])
    for row, token in zip(others, _draw(adjusted, [states[row] for row in others]), strict=True):
        tokens[row] = token
    return tokens


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


def _argmax(logits: torch.Tensor) -> list[int]:
    if not _has_kernels(logits):
        ids: list[int] = logits.argmax(dim=-1).tolist()
        return ids
    from handlers.cpu_kernels.rows import argmax_rows

    best = np.empty(len(logits), np.int64)
    argmax_rows(as_numpy(logits), best)
    return best.tolist()


def _masks(rows: list[int], states: list[SamplingState]) -> np.ndarray:
    """Return the masks of the grammars of these rows: (rows, words) uint32."""
    return np.stack([grammar.mask for row in rows if (grammar := states[row].grammar) is not None])


def _excluded(logits: torch.Tensor, masks: np.ndarray) -> torch.Tensor:
    """Return which logits (rows, vocabulary) the masks do not allow, on the logits' device."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little", count=logits.shape[-1])
    return torch.from_numpy(bits == 0).to(logits.device)


def _masked_argmax(logits: torch.Tensor, rows: list[int], states: list[SamplingState]) -> list[int]:
    masks = _masks(rows, states)
    for mask, row in zip(masks, rows, strict=True):
        banned = states[row].banned
        for token in () if banned is None else banned.now():
            mask[token // 32] &= ~np.uint32(1 << token % 32)
    if not _has_kernels(logits):
        return _argmax(logits[rows].masked_fill(_excluded(logits, masks), -torch.inf))
    from handlers.cpu_kernels.rows import masked_argmax_rows

    best = np.empty(len(rows), np.int64)
    masked_argmax_rows(as_numpy(logits), np.array(rows), masks, best)
    return best.tolist()


def _exclude(logits: torch.Tensor, rows: list[int], states: list[SamplingState]) -> None:
    """Set what the grammars of these rows do not allow to minus infinity, in place: float32 (all rows, vocabulary)."""
    masks = _masks(rows, states)
    if not _has_kernels(logits):
        logits[rows] = logits[rows].masked_fill(_excluded(logits, masks), -torch.inf)
        return
    from handlers.cpu_kernels.rows import mask_rows

    mask_rows(as_numpy(logits), np.array(rows), masks)


def _adjusted(logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
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


def _draw(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    tokens = [0] * len(states)
    greedy = [row for row, state in enumerate(states) if state.parameters.greedy]
    sampled = [row for row, state in enumerate(states) if not state.parameters.greedy]
    if greedy:
        for row, token in zip(greedy, logits[greedy].argmax(dim=-1).tolist(), strict=True):
            tokens[row] = token
    if sampled:
        drawn = _draw_sampled(logits[sampled], [states[row] for row in sampled])
        for row, token in zip(sampled, drawn, strict=True):
            tokens[row] = token
    return tokens


def _draw_sampled(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    tokens = [0] * len(states)
    groups: dict[_Draw, list[int]] = {}
    for row, state in enumerate(states):
        groups.setdefault(_way_to_draw(state.parameters, logits.device), []).append(row)
    for draw, rows in groups.items():
        part = logits if len(rows) == len(states) else logits[rows]
        for row, token in zip(rows, draw(part, [states[row] for row in rows]), strict=True):
            tokens[row] = token
    return tokens


def _way_to_draw(parameters: SamplingParameters, device: torch.device) -> _Draw:
    if parameters.typical_p < 1.0:
        return _draw_typical
    return _draw_by_kernel if device.type == "cpu" and _draws_from_all(parameters) else _draw_from_best


def _draws_from_all(parameters: SamplingParameters) -> bool:
    """Whether a token is drawn from all tokens of and above some logit, which needs no sorting."""
    return parameters.typical_p >= 1.0 and not parameters.top_k


def _draw_by_kernel(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    from handlers.cpu_kernels.rows import draw_rows

    keys = np.array([state.key for state in states], np.uint64)
    top_p = np.array([state.parameters.top_p for state in states], np.float32)
    min_p = np.array([state.parameters.min_p for state in states], np.float32)
    drawn = np.empty(len(states), np.int64)
    temperatures = np.array([state.parameters.temperature for state in states], np.float32)
    draw_rows(as_numpy(logits), temperatures, keys, top_p, min_p, drawn)
    return drawn.tolist()


def _draw_from_best(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    """Draw from the best tokens of each row, sorted: as many as the greatest top_k."""
    values, ids = _best(logits, states)
    values = values / _temperatures(logits, states)
    kept = _kept(values, [state.parameters for state in states])
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


def _kept(logits: torch.Tensor, parameters: list[SamplingParameters]) -> torch.Tensor:
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


def _draw_typical(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    values, ids = _best(logits / _temperatures(logits, states), states)
    kept = _kept(values, [state.parameters for state in states])
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
