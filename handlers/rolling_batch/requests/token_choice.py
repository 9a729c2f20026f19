"""The choice of the tokens of a step for its requests: a failure for one request fails it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from handlers.rolling_batch.request import Request
from handlers.rolling_batch.sampling.chosen import Chosen, Sampled
from handlers.rolling_batch.sampling.histories import DeviceHistories
from handlers.rolling_batch.sampling.sampler import choose
from lmi_server.contract.errors import is_device_failure


@dataclass(frozen=True)
class ChosenTokens:
    """The tokens of `requests`, row by row: `parts` has the tokens of their rows, or the error for one row.

    `tokens` (rows,) are on the device; rows whose choice failed have some token. `dtype` is that of the logits.
    """

    requests: Sequence[Request]
    tokens: torch.Tensor
    parts: Sequence[Chosen | BaseException]
    dtype: torch.dtype

    def read(self) -> list[Sampled | BaseException]:
        """Wait for the tokens; return them, or the error of a row."""
        outcomes: list[Sampled | BaseException] = []
        for part in self.parts:
            outcomes += [part] if isinstance(part, BaseException) else part.read()
        return outcomes


def choose_tokens(
    requests: Sequence[Request],
    logits: torch.Tensor,
    before: torch.Tensor | None = None,
    histories: DeviceHistories | None = None,
) -> ChosenTokens:
    """Choose the next token of each request from its row of logits (rows, vocabulary).

    `before` has the tokens of the step before, if the host does not know them yet. `histories` are kept from step to
    step.
    """
    if not requests:
        return ChosenTokens([], torch.empty(0, dtype=torch.long), [], logits.dtype)
    try:
        whole = choose(logits, [request.sampling for request in requests], before, histories=histories)
    # The border to torch and to kernels: the parameters of one request must not end the others.
    except BaseException as error:
        if is_device_failure(error):
            raise
        return _choose_one_by_one(requests, logits, before)
    return ChosenTokens(requests, whole.tokens, [whole], logits.dtype)


def _choose_one_by_one(requests: Sequence[Request], logits: torch.Tensor, before: torch.Tensor | None) -> ChosenTokens:
    tokens = logits.new_zeros(len(requests), dtype=torch.long)
    parts: list[Chosen | BaseException] = []
    for row, request in enumerate(requests):
        try:
            part = choose(logits[row : row + 1], [request.sampling], before, first_row=row)
            tokens[row : row + 1] = part.tokens
        except BaseException as error:  # the same border
            if is_device_failure(error):
                raise
            parts.append(error)
        else:
            parts.append(part)
    return ChosenTokens(requests, tokens, parts, logits.dtype)
