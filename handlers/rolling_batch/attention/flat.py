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
