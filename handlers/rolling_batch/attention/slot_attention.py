"""Attention of one flat forward pass over the slots of the KV cache, as an attention function of transformers.

transformers calls the function that is registered under the model's `attn_implementation` in every layer, with the
layer's queries, keys and values (its documented AttentionInterface). The pass holds one token of each decoding
sequence, then the prompt chunks. All of them share the projections and the MLP as rows of one matrix; only here do they
part, and each attends to its own slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from handlers.cpu_kernels.arguments import SlotSpan
from handlers.rolling_batch.attention.flat import FlatAttention
from handlers.rolling_batch.attention.kernel_attention import KernelAttention
from handlers.rolling_batch.attention.kv_cache import KVCache
from handlers.rolling_batch.attention.rows import ChunkGroup, StepRows, groups_of
from handlers.rolling_batch.attention.terms import AttentionTerms, States
from handlers.rolling_batch.attention.torch_attention import SingleRows, TorchAttention


class SlotAttention(FlatAttention):
    """The attention function of slots. `dtype` is that of queries, if it is not that of the cache."""

    def __init__(
        self,
        cache: KVCache,
        name: str,
        terms: Sequence[AttentionTerms],
        in_call_order: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(name, terms, in_call_order)
        self._cache = cache
        self._operators = _operators(cache, dtype)
        self._masked = TorchAttention(cache)  # for rows that see later ones
        self._rows = StepRows(np.empty(0, np.int64), np.empty(0, np.int64), [])
        self._groups: list[ChunkGroup] = []
        self._decoding: SingleRows | None = None
        self.has_kernels = isinstance(self._operators, KernelAttention)

    def row_by_row(self, start: int, end: int) -> bool:
        return (end - start) * end <= self._operators.single_area

    def begin(self, rows: StepRows) -> None:
        super().begin(rows)
        self._rows = rows
        self._groups = groups_of(rows.chunks)
        self._decoding = None

    def begin_decoding(self, rows: SingleRows) -> None:
        """Set the rows of the next forward passes, which decode; only without kernels."""
        super().begin_decoding(rows)
        self._decoding = rows

    def cache_of(self, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return a layer's keys and values as the kernels see them; None if the kernels do not support this cache."""
        return self._operators.cache_of(layer) if isinstance(self._operators, KernelAttention) else None

    def single_rows(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return slots and positions of all rows; None if some rows belong to chunks."""
        if self._groups or not len(self._rows.slots):
            return None
        return self._rows.slots, self._rows.positions

    def attend(self, layer: int, states: States) -> torch.Tensor:
        terms = self._terms[layer]
        harmless = self._operators.harmless
        states = States(states.query, harmless(states.key), harmless(states.value))
        if self._decoding is not None:
            assert isinstance(self._operators, TorchAttention)
            return self._operators.attend_rows(layer, states, self._decoding, terms)
        heads, rows, _ = states.query.shape
        out = states.query.new_zeros((rows, heads, states.value.shape[2]))  # padding rows stay zero
        if len(self._rows.slots):
            self._operators.attend_single(layer, states, self._rows, out, terms)
        for group in self._groups:
            self._prefill(layer, group, states, out, terms)
        return out

    def _prefill(self, layer: int, group: ChunkGroup, states: States, out: torch.Tensor, terms: AttentionTerms) -> None:
        """Attend for the chunks of a group: each row to the tokens that the group shares, and to its own sequence's.

        If those tokens are still in another slot, keys and values are that slot's, followed by the group's own. The
        copy to the slots of the group can then follow the step, off its critical path.
        """
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        first, rows, columns = group.chunks[0], group.rows, group.columns(terms.window, terms.chunk)
        query, key, value = (part[:, rows] for part in states)
        self._operators.write(layer, key, value, group)
        span = SlotSpan(first.slot, columns.begin, first.end)
        if first.source != first.slot:
            keys, values = (_gathered(kept, group, columns.begin) for kept in (keys, values))
            span = SlotSpan(0, 0, keys.shape[2])
        chunk = (States(query, keys, values), span, out[rows], columns, terms)
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
