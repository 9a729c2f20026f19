"""What the sampler keeps for one request."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from handlers.rolling_batch.device_arrays import upload
from handlers.rolling_batch.sampling import gumbel
from lmi_server.contract.generation import SamplingParameters

_MIN_CAPACITY = 64


class BannedTokens:
    """The tokens that a request must not generate next: `allowed_token_ids`, `bad_words` and `min_tokens`.

    `words` are the token ids of the bad words. The last token of a word is banned where the output ends with the
    others. `ends` are the tokens that end a sequence; they are banned before `min_tokens` tokens. `forced`: once an
    output has as many tokens as the number says, only these tokens are left (`forced_eos_token_id`).
    """

    def __init__(
        self,
        allowed: Sequence[int] | None,
        words: Sequence[Sequence[int]],
        ends: Iterable[int],
        min_tokens: int,
        forced: tuple[int, Sequence[int]] | None = None,
    ) -> None:
        self.output: list[int] = []
        self._allowed = None if allowed is None else np.array(allowed, np.int64)
        self._always = [word[0] for word in words if len(word) == 1]
        self._words = [(list(word[:-1]), word[-1]) for word in words if len(word) > 1]
        self._ends = list(ends)
        self._min_tokens = min_tokens
        self._forced = forced
        self.few = allowed is None and forced is None  # `now` names them all

    def mask(self, row: torch.Tensor) -> None:
        """Set the logits of the banned tokens to minus infinity, in place."""
        if self._forced is not None and len(self.output) >= self._forced[0]:
            _keep_only(row, self._forced[1])
            return
        if self._allowed is not None:
            _keep_only(row, self._allowed)
        if banned := self.now():
            row.index_fill_(0, upload(banned, row.device), -torch.inf)

    def now(self) -> list[int]:
        """Return the tokens that are banned next; tokens that `allowed` lacks are not among them."""
        ends = self._ends if len(self.output) < self._min_tokens else []
        words = [last for before, last in self._words if self.output[-len(before) :] == before]
        return [*self._always, *ends, *words]


def _keep_only(row: torch.Tensor, tokens: np.ndarray | Sequence[int]) -> None:
    """Set the logits of all other tokens to minus infinity, in place."""
    ids = upload(tokens, row.device)
    kept = row[ids]
    row.fill_(-torch.inf)
    row[ids] = kept


class TokenHistory:
    """The tokens of a request, prompt first. Tokens that the host does not know yet are negative numbers."""

    def __init__(self, prompt: list[int]) -> None:
        self.first_generated = self._known = self.length = len(prompt)
        self._tokens = np.array(prompt, np.int64)

    @property
    def tokens(self) -> np.ndarray:
        return self._tokens[: self.length]

    def since(self, place: int) -> list[int]:
        """Return the tokens from a place on."""
        if place + 1 == self.length:  # the newest one alone, as in most steps
            return [int(self._tokens[place])]
        known: list[int] = self._tokens[place : self.length].tolist()
        return known

    def append(self, token: int) -> None:
        if self.length == len(self._tokens):
            more = np.empty(max(len(self._tokens), _MIN_CAPACITY), np.int64)
            self._tokens = np.concatenate([self._tokens, more])
        self._tokens[self.length] = token
        self.length += 1

    def settle(self, token: int) -> None:
        """Put a token in place of the first one that is unknown."""
        self._tokens[self._known] = token
        self._known += 1


class TokenMask(Protocol):
    """The tokens that the grammar of a request allows next: `mask` has a bit per token, the lowest first, in uint32."""

    mask: np.ndarray


class SamplingState:
    """What the sampler keeps for one request: its parameters, its random numbers, the tokens seen so far.

    `plain`: the token is the argmax of the unchanged logits. `takes_greatest`: and nothing else is asked for.
    `unchanged`: it is drawn from them, as the kernel can. `masked`: it is the argmax of the tokens that `grammar` and
    `banned` allow. `needs_tokens`: the next token cannot be chosen before the host knows the one before it.
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
        self.stream = gumbel.stream_of(secrets.randbits(64) if parameters.seed is None else parameters.seed)
        self.position = 0  # of the next token in the output
        self.grammar = grammar
        counted = parameters.presence_penalty != 0.0 or parameters.frequency_penalty != 0.0
        self.has_penalties = counted or parameters.repetition_penalty != 1.0
        self.history = TokenHistory(prompt if parameters.repetition_penalty != 1.0 else [])  # of what is penalised
        self.bias_ids = np.array(list(parameters.logit_bias), np.int64)
        self.biases = np.array(list(parameters.logit_bias.values()), np.float32)
        changes_values = self.has_penalties or bool(parameters.logit_bias)
        changes_logits = changes_values or banned is not None
        self.plain = parameters.greedy and not changes_logits and grammar is None
        self.takes_greatest = self.plain and parameters.logprobs is None
        draws = not parameters.greedy and draws_from_all(parameters)
        self.unchanged = draws and not changes_logits and grammar is None
        is_masked = parameters.greedy and not changes_values and grammar is not None
        self.masked = is_masked and (banned is None or banned.few)
        self.needs_tokens = banned is not None or grammar is not None

    @property
    def key(self) -> int:
        """The key of the noise with which the next token is drawn."""
        return gumbel.key_of(self.stream, self.position)

    def ahead(self, places: int) -> SamplingState:
        """Return a copy for the token that comes `places` tokens later."""
        later = copy.copy(self)
        later.position += places
        return later

    def advance(self, unknown: int) -> None:
        """Go on to the next position. The host will know the token in between later: `unknown` stands for it."""
        self.position += 1
        if self.has_penalties:
            self.history.append(unknown)

    def settle(self, token: int) -> None:
        """Remember the first token that is unknown, for penalties and bans."""
        if self.has_penalties:
            self.history.settle(token)
        if self.banned is not None:
            self.banned.output.append(token)

    def record(self, token: int) -> None:
        """Go on to the next position behind a token that is known."""
        self.advance(token)
        self.settle(token)


def draws_from_all(parameters: SamplingParameters) -> bool:
    """Whether a token is drawn from all tokens of and above some logit, which needs no sorting."""
    return parameters.typical_p >= 1.0 and not parameters.top_k
