"""Attention of one flat forward pass over the pages of the KV cache, as an attention function of transformers."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import itertools
import weakref
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

_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, PageAttention] = weakref.WeakValueDictionary()


class PageAttention:
    """An attention function with the methods of `SlotAttention`. `terms` has those of each layer.

    Queries (1, heads, rows, dim), keys and values (1, kv_heads, rows, dim) -> ((1, rows, heads, value_dim), None).

    `in_call_order`: layers are counted as they are called, and their own numbers mean nothing.
    """

    has_kernels = False  # those for the CPU

    def __init__(
        self, cache: PagedCache, name: str, terms: Sequence[AttentionTerms], in_call_order: bool = False
    ) -> None:
        self._terms = terms
        self._in_call_order = in_call_order
        self._calls = 0  # in the current pass
        self._operators = _operators(cache)
        self._step = StepRows(np.empty(0, np.int64), np.empty(0, np.int64), [])
        self._rows: dict[torch.device, PageRows] = {}  # of `_step`: copied to a device once, not in every layer
        self._decoding: PageRows | None = None
        self._number = next(_numbers)
        _by_number[self._number] = self
        AttentionInterface.register(name, self)

    def row_by_row(self, start: int, end: int) -> bool:
        """Whether a chunk of tokens `start:end` attends row by row, like decode rows: none does."""
        return False

    def begin(self, rows: StepRows) -> None:
        """Set what the rows of the next forward pass are."""
        self._step, self._rows, self._decoding = rows, {}, None
        self._calls = 0

    def begin_decoding(self, rows: SingleRows) -> None:
        """Set the rows of the next forward passes, which decode."""
        self._decoding = PageRows.from_singles(rows)
        self._calls = 0

    def begin_rows(self, rows: PageRows) -> None:
        """Set the rows of the next forward passes, which are on their device already."""
        self._decoding = rows
        self._calls = 0

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
        layer: int = self._next_layer() if self._in_call_order else module.layer_idx
        rows = self._rows_on(query.device)
        if torch.compiler.is_compiling():
            states = (query[0], key[0], value[0], rows.slots, rows.positions)
            return _attend_compiled(*states, rows.columns, self._number, layer).unsqueeze(0), None
        return self.attend(layer, query[0], key[0], value[0], rows).unsqueeze(0), None

    def _next_layer(self) -> int:
        self._calls += 1
        return self._calls - 1

    def _rows_on(self, device: torch.device) -> PageRows:
        if self._decoding is not None:
            return self._decoding
        if device not in self._rows:
            self._rows[device] = PageRows.from_step(self._step, device)
        return self._rows[device]

    @property
    def rotates(self) -> bool:
        """Whether `attend_projected` takes what the projections of a layer returned."""
        return bool(self._operators.rotates)

    def attend_projected(
        self, layer: int, projected: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int, chained: bool
    ) -> torch.Tensor:
        """See FlatAttention."""
        rows = self._rows_on(projected.device)
        return self._operators.attend_projected(
            layer, projected, cosines, sines, heads, rows, self._terms[layer], chained
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PageRows
    ) -> torch.Tensor:
        """Query (heads, rows, dim), keys and values (kv_heads, rows, dim) -> (rows, heads, value_dim)."""
        out = rows.empty_or_zero(query, (query.shape[1], query.shape[0], value.shape[2]))
        self._operators.attend(layer, query, key, value, rows, out, self._terms[layer])
        return out


@torch.library.custom_op("lmi_server::attend_pages", mutates_args=())
def _attend_compiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    columns: int,
    attention: int,
    layer: int,
) -> torch.Tensor:
    """One operation for torch.compile, which looks into no launch: rows that decode, by the attention of a number."""
    rows = PageRows(slots, positions, len(slots), columns)
    return _by_number[attention].attend(layer, query, key, value, rows)


@_attend_compiled.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((query.shape[1], query.shape[0], value.shape[2]))


def _operators(cache: PagedCache) -> Any:
    """Return the Triton kernels on GPUs; elsewhere torch's operators."""
    if all(device.type == "cuda" for device in cache.tables):
        from handlers.rolling_batch.pages.triton_pages import TritonPages

        return TritonPages(cache)
    return TorchPages(cache)
