"""Attention of one flat forward pass over the pages of the KV cache, as an attention function of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from handlers.rolling_batch.attention.rows import StepRows
from handlers.rolling_batch.attention.terms import AttentionTerms
from handlers.rolling_batch.attention.torch_attention import SingleRows
from handlers.rolling_batch.pages.cache import PagedCache
from handlers.rolling_batch.pages.rows import PageRows
from handlers.rolling_batch.pages.torch_pages import TorchPages


class PageAttention:
    """An attention function with the methods of `SlotAttention`. `terms` has those of each layer.

    Queries (1, heads, rows, dim), keys and values (1, kv_heads, rows, dim) -> ((1, rows, heads, value_dim), None).
    """

    has_kernels = False  # those for the CPU

    def __init__(self, cache: PagedCache, name: str, terms: Sequence[AttentionTerms]) -> None:
        self._terms = terms
        self._operators = _operators(cache)
        self._step = StepRows(np.empty(0, np.int64), np.empty(0, np.int64), [])
        self._rows: dict[torch.device, PageRows] = {}  # of `_step`: copied to a device once, not in every layer
        self._decoding: PageRows | None = None
        AttentionInterface.register(name, self)

    def row_by_row(self, start: int, end: int) -> bool:
        """Whether a chunk of tokens `start:end` attends row by row, like decode rows: none does."""
        return False

    def begin(self, rows: StepRows) -> None:
        """Set what the rows of the next forward pass are."""
        assert not any(chunk.blocks for chunk in rows.chunks), "the kernels let no token see later ones"
        self._step, self._rows, self._decoding = rows, {}, None

    def begin_decoding(self, rows: SingleRows) -> None:
        """Set the rows of the next forward passes, which decode."""
        self._decoding = PageRows.from_singles(rows)

    def cache_of(self, layer: int) -> None:
        """Return None: no kernels for the CPU support this cache."""

    def single_rows(self) -> None:
        """Return None: no kernels for the CPU compute a whole pass."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        layer: int = module.layer_idx
        rows = self._decoding
        if rows is None:
            if query.device not in self._rows:
                self._rows[query.device] = PageRows.from_step(self._step, query.device)
            rows = self._rows[query.device]
        out = query.new_zeros((query.shape[2], query.shape[1], value.shape[3]))  # padding rows stay zero
        self._operators.attend(layer, query[0], key[0], value[0], rows, out, self._terms[layer])
        return out.unsqueeze(0), None


def _operators(cache: PagedCache) -> Any:
    """Return the Triton kernels on GPUs; elsewhere torch's operators."""
    if all(device.type == "cuda" for device in cache.tables):
        from handlers.rolling_batch.pages.triton_pages import TritonPages

        return TritonPages(cache)
    return TorchPages(cache)
