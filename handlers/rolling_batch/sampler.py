"""Chooses the next token of every sequence of a step from its logits.

The parameters mean what transformers' logits processors of the same names mean. Each kind of work is done for the rows
that ask for it only, for all of them at once. A request draws from a random stream of its own, one number per token, so
that a seed gives the same output in any batch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from handlers.rolling_batch.attention import as_numpy
from lmi_server.contract.generation import SamplingParameters

_CANDIDATES = 1024  # nucleus sampling tries so many best tokens before it sorts the whole vocabulary


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
        self._always = torch.tensor([word[0] for word in words if len(word) == 1], dtype=torch.long)
        self._words = [(list(word[:-1]), word[-1]) for word in words if len(word) > 1]
        self._ends = torch.tensor(list(ends), dtype=torch.long)
        self._least = least

    def mask(self, row: torch.Tensor) -> None:
        """Set the logits of the banned tokens to minus infinity, in place."""
        if self._allowed is not None:
            allowed = self._allowed.to(row.device)
            kept = row[allowed]
            row.fill_(-torch.inf)
            row[allowed] = kept
        row[self._always.to(row.device)] = -torch.inf
        if len(self.output) < self._least:
            row[self._ends.to(row.device)] = -torch.inf
        for before, last in self._words:
            if self.output[-len(before) :] == before:
                row[last] = -torch.inf


class SamplingState:
    """What the sampler keeps for one request: its parameters, its random stream, the tokens seen so far.

    `plain`: the token is the argmax of the unchanged logits. `banned` are the tokens that it must not choose.
    """

    def __init__(self, parameters: SamplingParameters, prompt: list[int], banned: BannedTokens | None = None) -> None:
        self.parameters = parameters
        self.banned = banned
        self._random = random.Random(parameters.seed)
        self._penalised = parameters.repetition_penalty != 1.0
        self._counted = parameters.presence_penalty != 0.0 or parameters.frequency_penalty != 0.0
        self.seen: set[int] = set(prompt) if self._penalised else set()
        self.seen_ids = torch.tensor(sorted(self.seen), dtype=torch.long)
        self.generated: Counter[int] = Counter()
        self.bias_ids = torch.tensor(list(parameters.logit_bias), dtype=torch.long)
        self.biases = torch.tensor(list(parameters.logit_bias.values()), dtype=torch.float32)
        self.changes_logits = self._penalised or self._counted or bool(parameters.logit_bias) or banned is not None
        self.plain = parameters.greedy and not self.changes_logits

    def draw(self) -> float:
        """Return the request's next random number in [0, 1)."""
        return self._random.random()

    def record(self, token: int) -> None:
        """Remember a generated token for the penalties."""
        if self._penalised and token not in self.seen:
            self.seen.add(token)
            self.seen_ids = torch.cat((self.seen_ids, torch.tensor([token])))
        if self._counted:
            self.generated[token] += 1
        if self.banned is not None:
            self.banned.output.append(token)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token, with `logprob` and `top` (token, log probability) if the request asks for them."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: torch.Tensor, states: list[SamplingState]) -> list[Sampled]:
    """Choose one token per row: logits (rows, vocabulary) of any float type, one state per row."""
    tokens = _choose(logits, states)
    for token, state in zip(tokens, states, strict=True):
        state.record(token)
    scored = [row for row, state in enumerate(states) if state.parameters.logprobs is not None]
    result = [Sampled(token) for token in tokens]
    if scored:
        counts = [states[row].parameters.logprobs or 0 for row in scored]
        chosen = [tokens[row] for row in scored]
        scored_logits = logits if len(scored) == len(states) else logits[scored]
        for row, entry in zip(scored, score(scored_logits, chosen, counts), strict=True):
            result[row] = entry
    return result


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
    # Rows that only need their argmax are spared the float32 copy of the vocabulary that all other sampling works on.
    plain = [row for row, state in enumerate(states) if state.plain]
    others = [row for row, state in enumerate(states) if not state.plain]
    tokens = [0] * len(states)
    if plain:
        for row, token in zip(plain, _argmax(logits[plain]), strict=True):
            tokens[row] = token
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
    from handlers.rolling_batch.cpu_kernels.rows import log_sum_exp_rows

    result = np.empty(len(logits), np.float32)
    log_sum_exp_rows(as_numpy(logits), result)
    return torch.from_numpy(result)


def _argmax(logits: torch.Tensor) -> list[int]:
    if not _has_kernels(logits):
        ids: list[int] = logits.argmax(dim=-1).tolist()
        return ids
    from handlers.rolling_batch.cpu_kernels.rows import argmax_rows

    best = np.empty(len(logits), np.int64)
    argmax_rows(as_numpy(logits), best)
    return best.tolist()


def _adjusted(logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    """Apply penalties and biases to float32 logits (rows, vocabulary), in place."""
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
    parameters = [state.parameters for state in states]
    temperatures = torch.tensor([entry.temperature for entry in parameters], device=logits.device)
    logits = logits / temperatures[:, None]
    candidates = _best_candidates(logits, parameters) if any(map(_truncated, parameters)) else None
    tokens = []
    for row, state in enumerate(states):
        head = candidates.restrict(row, state.parameters) if candidates and _truncated(state.parameters) else None
        if head is None:
            tokens.append(_draw_full(logits[row], state))
        else:
            ids, weights = head
            tokens.append(int(ids[_inverse(weights, state.draw())]))
    return tokens


def _truncated(parameters: SamplingParameters) -> bool:
    """Whether only the most likely tokens can be drawn. Typical sampling may leave these out, and is not meant."""
    return parameters.typical_p >= 1.0 and (parameters.top_k > 0 or parameters.top_p < 1.0 or parameters.min_p > 0.0)


@dataclass(frozen=True)
class _Candidates:
    """The best tokens of each row in descending order: ids and probabilities (rows, candidates)."""

    ids: torch.Tensor
    probabilities: torch.Tensor
    complete: bool  # whether they are the whole vocabulary

    def restrict(self, row: int, parameters: SamplingParameters) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the ids that may be drawn and their weights; None if a token beyond the candidates may be, too."""
        ids, weights = self.ids[row], self.probabilities[row]
        if 0 < parameters.top_k <= len(ids):
            ids, weights = ids[: parameters.top_k], weights[: parameters.top_k]
            weights = weights / weights.sum()
        elif parameters.top_k and not self.complete:
            return None
        if parameters.top_p < 1.0:
            before = weights.cumsum(0) - weights
            keep = max(1, int((before < parameters.top_p).sum()))
            if keep == len(ids) and not self.complete and not parameters.top_k:
                return None
            ids, weights = ids[:keep], weights[:keep]
        if parameters.min_p > 0.0:
            keep = max(1, int((weights >= parameters.min_p * weights[0]).sum()))
            if keep == len(ids) and not self.complete and not parameters.top_k and parameters.top_p >= 1.0:
                return None
            ids, weights = ids[:keep], weights[:keep]
        return ids, weights


def _best_candidates(logits: torch.Tensor, parameters: list[SamplingParameters]) -> _Candidates:
    vocabulary = logits.shape[-1]
    most = max((entry.top_k for entry in parameters if _truncated(entry)), default=0)
    needs_tail = any(_truncated(entry) and entry.top_k == 0 for entry in parameters)
    count = min(vocabulary, max(most, _CANDIDATES if needs_tail else 1))
    values, ids = logits.topk(count, dim=-1)
    probabilities = torch.exp(values - logits.logsumexp(dim=-1, keepdim=True))
    return _Candidates(ids, probabilities, count == vocabulary)


def _draw_full(logits: torch.Tensor, state: SamplingState) -> int:
    """Draw a token of one row from the whole vocabulary."""
    parameters = state.parameters
    if not _truncated(parameters) and parameters.typical_p >= 1.0:
        return _inverse(torch.softmax(logits, dim=-1), state.draw())
    probabilities, ids = torch.softmax(logits, dim=-1).sort(descending=True, stable=True)
    head = _Candidates(ids[None], probabilities[None], complete=True).restrict(0, parameters)
    assert head is not None  # there are no tokens beyond complete candidates
    ids, weights = head
    if parameters.typical_p < 1.0:
        ids, weights = _typical(ids, weights / weights.sum(), parameters.typical_p)
    return int(ids[_inverse(weights, state.draw())])


def _typical(ids: torch.Tensor, weights: torch.Tensor, mass: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the tokens whose information is nearest to its expectation, with `mass` in all (Meister et al., 2022)."""
    surprise = -weights.clamp_min(torch.finfo(weights.dtype).tiny).log()
    entropy = (weights * surprise).sum()
    order = (surprise - entropy).abs().argsort(stable=True)
    sorted_weights = weights[order]
    keep = int((sorted_weights.cumsum(0) < mass).sum()) + 1
    kept = order[:keep]
    return ids[kept], weights[kept]


def _inverse(weights: torch.Tensor, uniform: float) -> int:
    """Return the index that `uniform` in [0, 1) falls on in the cumulative sum of `weights` (inverse transform)."""
    # In double precision, because float32 sums over a vocabulary of 100,000 lose the probabilities of rare tokens.
    sums = weights.double().cumsum(0)
    index = int(torch.searchsorted(sums, uniform * float(sums[-1]), right=True))
    return min(index, len(weights) - 1)
