"""What the sampler keeps for one request."""

from __future__ import annotations

import copy
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from handlers.rolling_batch.sampling import gumbel
from lmi_server.contract.generation import SamplingParameters


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
        self._allowed = None if allowed is None else torch.tensor(allowed, dtype=torch.long)
        self._always = [word[0] for word in words if len(word) == 1]
        self._words = [(list(word[:-1]), word[-1]) for word in words if len(word) > 1]
        self._ends = list(ends)
        self._min_tokens = min_tokens
        self._forced = forced
        self.few = allowed is None and forced is None  # `now` names them all

    def mask(self, row: torch.Tensor) -> None:
        """Set the logits of the banned tokens to minus infinity, in place."""
        if self._forced is not None and len(self.output) >= self._forced[0]:
            _keep_only(row, torch.tensor(self._forced[1], dtype=torch.long))
            return
        if self._allowed is not None:
            _keep_only(row, self._allowed)
        row[torch.tensor(self.now(), dtype=torch.long, device=row.device)] = -torch.inf

    def now(self) -> list[int]:
        """Return the tokens that are banned next; tokens that `allowed` lacks are not among them."""
        ends = self._ends if len(self.output) < self._min_tokens else []
        words = [last for before, last in self._words if self.output[-len(before) :] == before]
        return [*self._always, *ends, *words]


def _keep_only(row: torch.Tensor, tokens: torch.Tensor) -> None:
    """Set the logits of all other tokens to minus infinity, in place."""
    kept = row[tokens.to(row.device)]
    row.fill_(-torch.inf)
    row[tokens.to(row.device)] = kept


class TokenMask(Protocol):
    """The tokens that the grammar of a request allows next: `mask` has a bit per token, the lowest first, in uint32."""

    mask: np.ndarray


class SamplingState:
    """What the sampler keeps for one request: its parameters, its random numbers, the tokens seen so far.

    `plain`: the token is the argmax of the unchanged logits. `unchanged`: it is drawn from them, as the kernel can.
    `masked`: it is the argmax of the tokens that `grammar` and `banned` allow.
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
        draws = not parameters.greedy and draws_from_all(parameters)
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


def draws_from_all(parameters: SamplingParameters) -> bool:
    """Whether a token is drawn from all tokens of and above some logit, which needs no sorting."""
    return parameters.typical_p >= 1.0 and not parameters.top_k
