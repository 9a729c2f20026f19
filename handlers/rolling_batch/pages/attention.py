"""Attention of one flat forward pass over the pages of the KV cache, as an attention function of transformers."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from handlers.rolling_batch.attention.flat import FlatAttention
from handlers.rolling_batch.attention.rows import StepRows
from handlers.rolling_batch.attention.terms import AttentionTerms, States
from handlers.rolling_batch.attention.torch_attention import SingleRows
from handlers.rolling_batch.pages.cache import PagedCache
from handlers.rolling_batch.pages.rows import PageRows
from handlers.rolling_batch.pages.torch_pages import TorchPages

_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, PageAttention] = weakref.WeakValueDictionary()


class PageAttention(FlatAttention):
    """The attention function of pages."""

    def __init__(
        self, cache: PagedCache, name: str, terms: Sequence[AttentionTerms], in_call_order: bool = False
    ) -> None:
        super().__init__(name, terms, in_call_order)
        self._operators = _operators(cache)
        self._step = StepRows(np.empty(0, np.int64), np.empty(0, np.int64), [])
        self._rows: dict[torch.device, PageRows] = {}  # of `_step`: copied to a device once, not in every layer
        self._decoding: PageRows | None = None
        self._number = next(_numbers)
        _by_number[self._number] = self
        self.rotates = self._operators.rotates

    def begin(self, rows: StepRows) -> None:
        super().begin(rows)
        self._step, self._rows, self._decoding = rows, {}, None

    def begin_decoding(self, rows: SingleRows) -> None:
        super().begin_decoding(rows)
        self._decoding = PageRows.from_singles(rows)

    def begin_rows(self, rows: PageRows) -> None:
        """Set the rows of the next forward passes, which are on their device already."""
        self._decoding = rows
        self._calls = 0

    def attend(self, layer: int, states: States) -> torch.Tensor:
        rows = self._rows_on(states.query.device)
        if torch.compiler.is_compiling():
            return _attend_compiled(*states, rows.slots, rows.positions, rows.columns, self._number, layer)
        return self.attend_rows(layer, states, rows)

    def _rows_on(self, device: torch.device) -> PageRows:
        if self._decoding is not None:
            return self._decoding
        if device not in self._rows:
            self._rows[device] = PageRows.from_step(self._step, device)
        return self._rows[device]

    def attend_projected(
        self, layer: int, projected: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int, chained: bool
    ) -> torch.Tensor:
        rows = self._rows_on(projected.device)
        return self._operators.attend_projected(
            layer, projected, cosines, sines, heads, rows, self._terms[layer], chained
        )

    def attend_rows(self, layer: int, states: States, rows: PageRows) -> torch.Tensor:
        """Return attended values, (rows, heads, value_dim)."""
        query, _, value = states
        out = rows.empty_or_zero(query, (query.shape[1], query.shape[0], value.shape[2]))
        self._operators.attend(layer, states, rows, out, self._terms[layer])
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
    return _by_number[attention].attend_rows(layer, States(query, key, value), rows)


@_attend_compiled.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((query.shape[1], query.shape[0], value.shape[2]))


def _operators(cache: PagedCache) -> Any:
    """Return the Triton kernels on GPUs; elsewhere torch's operators."""
    if all(device.type == "cuda" for device in cache.tables):
        from handlers.rolling_batch.pages.triton_pages import TritonPages

        return TritonPages(cache)
    return TorchPages(cache)
