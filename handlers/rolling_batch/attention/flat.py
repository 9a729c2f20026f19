"""What an attention function of flat passes offers, whatever the KV cache is made of."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from handlers.rolling_batch.attention.rows import StepRows
from handlers.rolling_batch.attention.torch_attention import SingleRows


class FlatAttention(Protocol):
    """An attention function of transformers; it keeps keys and values by the rows that it was told last.

    Queries (1, heads, rows, dim), keys and values (1, kv_heads, rows, dim) -> ((1, rows, heads, value_dim), None).
    """

    @property
    def rotates(self) -> bool:
        """Whether `attend_projected` takes what the projections of a layer returned."""
        ...

    def attend_projected(
        self, layer: int, projected: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int, chained: bool
    ) -> torch.Tensor:
        """Return attended values, (rows, heads * dim), of queries, keys and values side by side, which are changed.

        `projected` is (rows, (heads + 2 * kv_heads) * dim), cosines and sines are (rows, dim). `chained`: the launches
        may begin before the one in front of them has ended.
        """
        ...

    def begin(self, rows: StepRows) -> None:
        """Set what the rows of the next forward pass are."""
        ...

    def begin_decoding(self, rows: SingleRows) -> None:
        """Set the rows of the next forward passes, which decode."""
        ...

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]: ...
