"""Attention of one flat forward pass over the slots of the KV cache, as an attention function of transformers.

transformers calls the function that is registered under the model's `attn_implementation` in every layer, with the
layer's queries, keys and values (its documented AttentionInterface). The pass holds one token of each decoding
sequence, then the prompt chunks. All of them share the projections and the MLP as rows of one matrix; only here do they
part, and each attends to its own slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from handlers.cpu_kernels.arguments import SlotSpan
from handlers.rolling_batch.attention.kernel_attention import KernelAttention
from handlers.rolling_batch.attention.kv_cache import KVCache
from handlers.rolling_batch.attention.rows import ChunkGroup, StepRows, groups_of
from handlers.rolling_batch.attention.terms import AttentionTerms
from handlers.rolling_batch.attention.torch_attention import SingleRows, TorchAttention


class SlotAttention:
    """An attention function; `begin` sets what the next forward pass holds. `terms` has those of each layer.

    Queries (1, heads, rows, dim), keys and values (1, kv_heads, rows, dim) -> ((1, rows, heads, value_dim), None).

    `in_call_order`: layers are counted as they are called, and their own numbers mean nothing. `dtype` is that of
    queries, if it is not that of the cache.
    """

    rotates = False

    def __init__(
        self,
        cache: KVCache,
        name: str,
        terms: Sequence[AttentionTerms],
        in_call_order: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._cache = cache
        self._terms = terms
        self._operators = _operators(cache, dtype)
        self._masked = TorchAttention(cache)  # for rows that see later ones
        self._rows = StepRows(np.empty(0, np.int64), np.empty(0, np.int64), [])
        self._groups: list[ChunkGroup] = []
        self._decoding: SingleRows | None = None
        self._in_call_order = in_call_order
        self._calls = 0  # in the current pass
        AttentionInterface.register(name, self)

    def row_by_row(self, start: int, end: int) -> bool:
        """Whether a chunk of tokens `start:end` attends row by row, like decode rows, rather than as one product."""
        return (end - start) * end <= self._operators.single_area

    def begin(self, rows: StepRows) -> None:
        """Set what the rows of the next forward pass are."""
        self._rows = rows
        self._groups = groups_of(rows.chunks)
        self._decoding = None
        self._calls = 0

    def begin_decoding(self, rows: SingleRows) -> None:
        """Set the rows of the next forward passes, which decode; only without kernels."""
        self._decoding = rows

    def attend_projected(
        self, layer: int, projected: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int, chained: bool
    ) -> torch.Tensor:
        """Raise NotImplementedError: see `rotates`."""
        raise NotImplementedError

    @property
    def has_kernels(self) -> bool:
        """Whether the compiled CPU kernels attend, and not torch's operators."""
        return isinstance(self._operators, KernelAttention)

    def cache_of(self, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return a layer's keys and values as the kernels see them; None if the kernels do not support this cache."""
        return self._operators.cache_of(layer) if isinstance(self._operators, KernelAttention) else None

    def single_rows(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return slots and positions of all rows; None if some rows belong to chunks."""
        if self._groups or not len(self._rows.slots):
            return None
        return self._rows.slots, self._rows.positions

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
        terms = self._terms[layer]
        key, value = self._operators.harmless(key), self._operators.harmless(value)
        if self._decoding is not None:
            assert isinstance(self._operators, TorchAttention)
            rows = (query[0], key[0], value[0], self._decoding)
            return self._operators.attend_rows(layer, *rows, terms).unsqueeze(0), None
        out = query.new_zeros((query.shape[2], query.shape[1], value.shape[3]))  # padding rows stay zero
        if len(self._rows.slots):
            self._operators.attend_single(layer, query[0], key[0], value[0], self._rows, out, terms)
        for group in self._groups:
            self._prefill(layer, group, query[0], key[0], value[0], out, terms)
        return out.unsqueeze(0), None

    def _next_layer(self) -> int:
        self._calls += 1
        return self._calls - 1

    def _prefill(
        self,
        layer: int,
        group: ChunkGroup,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        terms: AttentionTerms,
    ) -> None:
        """Attend for the chunks of a group: each row to the tokens that the group shares, and to its own sequence's.

        If those tokens are still in another slot, keys and values are that slot's, followed by the group's own. The
        copy to the slots of the group can then follow the step, off its critical path.
        """
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        self._operators.write(layer, key[:, group.rows], value[:, group.rows], group)
        first, rows, columns = group.chunks[0], group.rows, group.columns(terms.window, terms.chunk)
        span = SlotSpan(first.slot, columns.begin, first.end)
        if first.source != first.slot:
            keys, values = (_gathered(kept, group, columns.begin) for kept in (keys, values))
            span = SlotSpan(0, 0, keys.shape[2])
        chunk = (query[:, rows], keys, values, span, out[rows], columns, terms)
        ends = group.ends(terms.window, columns)
        if ends is None:
            self._operators.attend_chunk(*chunk)
        else:
            self._masked.attend_chunk(*chunk, ends)


def _gathered(kept: torch.Tensor, group: ChunkGroup, begin: int) -> torch.Tensor:
    """Return keys or values, (1, kv_heads, columns, dim): from token `begin` on in the source, then the group's own."""
    first = group.chunks[0]
    before = kept[first.source, :, begin : first.start]
    return torch.cat((before, *(kept[chunk.slot, :, chunk.start : chunk.end] for chunk in group.chunks)), 1)[None]


def _operators(cache: KVCache, dtype: torch.dtype | None) -> KernelAttention | TorchAttention:
    if not cache.keys:  # no layer attends
        return TorchAttention(cache)
    keys = cache.keys[0]
    computed = dtype or keys.dtype
    if keys.device.type == "cpu" and computed in (torch.bfloat16, torch.float32):
        return KernelAttention(cache, computed)
    return TorchAttention(cache)
