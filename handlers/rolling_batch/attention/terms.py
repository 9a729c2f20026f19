"""What a layer attends with: queries, keys and values, and how, in one small record for every kind of kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from handlers.cpu_kernels.arguments import AttentionSettings

_NO_SINKS = np.empty(0, np.float32)


class States(NamedTuple):
    """Queries (heads, rows, dim), keys (kv_heads, rows, dim) and values (kv_heads, rows, value_dim) of a layer."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, eq=False)
class AttentionTerms:
    """How a layer attends, the same in every pass.

    A token at position p sees the tokens p + 1 - `window` to p, and of these only the ones from the last multiple of
    `chunk` on; 0 is no limit. The scores are products times `scaling`; with a `softcap` c above 0 they become c *
    tanh(score / c). `sinks`, (heads,), are scores of a token without a value, which only takes its share of the weights
    (gpt-oss).
    """

    scaling: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there are no more terms than scaling, window and soft cap."""
        return self.sinks is None and not self.chunk

    @functools.cached_property
    def settings(self) -> AttentionSettings:
        """The terms as the CPU kernels take them."""
        sinks = _NO_SINKS if self.sinks is None else self.sinks.detach().float().cpu().contiguous().numpy()
        terms = (self.scaling, self.window, self.chunk, self.softcap)
        return AttentionSettings(*terms, torch.get_num_threads(), sinks)


def terms_of(head_dim: int, call: dict[str, Any], chunk: int) -> AttentionTerms:
    """Return the terms of a layer that calls its attention function with the keyword arguments `call`."""
    scaling = call.get("scaling")
    sinks = call.get("s_aux") if call.get("s_aux") is not None else call.get("sinks")
    return AttentionTerms(
        float(head_dim**-0.5 if scaling is None else scaling),
        int(call.get("sliding_window") or 0),
        chunk,
        float(call.get("softcap") or 0.0),
        sinks,
    )
