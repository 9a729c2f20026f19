"""What the attention functions of flat passes have in common, whatever the KV cache is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface

from handlers.rolling_batch.attention.rows import StepRows
from handlers.rolling_batch.attention.terms import AttentionTerms, States
from handlers.rolling_batch.attention.torch_attention import SingleRows


class FlatAttention(ABC):
    """An attention function of transformers; it keeps keys and values by the rows that it was told last.

    Queries (1, heads, rows, dim), keys and values (1, kv_heads, rows, dim) -> ((1, rows, heads, value_dim), None).

    `terms` has those of each layer. `in_call_order`: layers are counted as they are called, and their own numbers mean
    nothing.
    """

    rotates = False
    """Whether `attend_projected` takes what the projections of a layer returned."""
    has_kernels = False
    """Whether the compiled CPU kernels attend."""

    def __init__(self, name: str, terms: Sequence[AttentionTerms], in_call_order: bool) -> None:
        self._terms = terms
        self._in_call_order = in_call_order
        self._calls = 0  # in the current pass
        AttentionInterface.register(name, self)

    @abstractmethod
    def attend(self, layer: int, states: States) -> torch.Tensor:
        """Return attended values, (rows, heads, value_dim)."""

    def attend_projected(
        self, layer: int, projected: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int, chained: bool
    ) -> torch.Tensor:
        """Return attended values, (rows, heads * dim), of queries, keys and values side by side, which are changed.

        `projected` is (rows, (heads + 2 * kv_heads) * dim), cosines and sines are (rows, dim). `chained`: the launches
        may begin before the one in front of them has ended.
        """
        raise NotImplementedError

    def begin(self, rows: StepRows) -> None:
        """Set what the rows of the next forward pass are."""
        self._calls = 0

    def begin_decoding(self, rows: SingleRows) -> None:
        """Set the rows of the next forward passes, which decode."""
        self._calls = 0

    def row_by_row(self, start: int, end: int) -> bool:
        """Whether a chunk of tokens `start:end` attends row by row, like decode rows, rather than as one product."""
        return False

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        layer: int = self._next_layer() if self._in_call_order else module.layer_idx
        return self.attend(layer, States(query[0], key[0], value[0])).unsqueeze(0), None

    def _next_layer(self) -> int:
        self._calls += 1
        return self._calls - 1
