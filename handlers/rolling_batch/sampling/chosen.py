"""The chosen tokens of a step, on their device, and on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from handlers.cpu_kernels.arguments import NO_TOKEN
from handlers.rolling_batch.device_arrays import Download


class Sampled(NamedTuple):
    """A chosen token, with `logprob` and `top` (token, log probability) if the request asks for them."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Scores:
    """Log probabilities: of a token in each of some rows, and of the best tokens of each of these rows.

    `top` says how many of the best tokens each row wants; `values` and `ids` (rows, most) are None if none wants any.
    """

    def __init__(
        self, chosen: torch.Tensor, values: torch.Tensor | None, ids: torch.Tensor | None, top: Sequence[int]
    ) -> None:
        self.tensors = [chosen] if values is None or ids is None else [chosen, values, ids]
        self._top = top

    def sampled(self, tokens: Sequence[int], arrived: Sequence[torch.Tensor]) -> list[Sampled]:
        """Return the scored `tokens`; `arrived` are `tensors` on the host."""
        chosen: list[float] = arrived[0].tolist()
        if len(arrived) == 1:
            return [Sampled(token, value) for token, value in zip(tokens, chosen, strict=True)]
        alternatives = [
            tuple(zip(ids[:own], values[:own], strict=True))
            for values, ids, own in zip(arrived[1].tolist(), arrived[2].tolist(), self._top, strict=True)
        ]
        return [Sampled(*entry) for entry in zip(tokens, chosen, alternatives, strict=True)]


class Chosen:
    """A token for each row of a step.

    `tokens` (rows,) int64 are on the device, for the next step to compute with: also of rows whose logits are not
    finite. `told` has what the host may tell of them; `read` returns that, and waits for the device.
    """

    def __init__(
        self, tokens: torch.Tensor, told: torch.Tensor, scores: Scores | None = None, scored: Sequence[int] = ()
    ) -> None:
        self.tokens = tokens
        self._scores, self._scored = scores, scored
        self._download = Download([told] if scores is None else [told, *scores.tensors])

    def read(self) -> list[Sampled]:
        """Return the chosen token of each row, NO_TOKEN where the logits are not finite."""
        told, *arrived = self._download.read()
        tokens: list[int] = told.tolist()
        result = [Sampled(token) for token in tokens]
        if self._scores is not None:
            scored = self._scores.sampled([tokens[row] for row in self._scored], arrived)
            for row, entry in zip(self._scored, scored, strict=True):
                if entry.token != NO_TOKEN:
                    result[row] = entry
        return result
