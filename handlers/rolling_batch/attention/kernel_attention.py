"""Attention by the compiled CPU kernels."""

from __future__ import annotations

import numpy as np
import torch

from handlers.cpu_kernels.arguments import SeenColumns, SlotSpan
from handlers.cpu_kernels.arrays import as_numpy
from handlers.rolling_batch.attention.kv_cache import KVCache
from handlers.rolling_batch.attention.rows import ChunkGroup, StepRows
from handlers.rolling_batch.attention.terms import AttentionTerms, States


class KernelAttention:
    """The same methods as `TorchAttention`, for a KV cache in main memory."""

    # Rows times tokens seen, up to which a chunk is faster row by row: a product of tiles first copies keys and values
    # to another layout, which pays off only if enough rows share them.
    single_area = 2048

    def __init__(self, cache: KVCache, dtype: torch.dtype | None = None) -> None:
        """`dtype` is that of queries, bfloat16 or float32, if it is not that of the cache."""
        from handlers.cpu_kernels.attention.chunks import chunk_attention
        from handlers.cpu_kernels.attention.decoding import slot_attention, write_rows

        kept = as_numpy(cache.keys[0]).dtype
        rows = kept if dtype is None else as_numpy(torch.empty(0, dtype=dtype)).dtype
        self._kernel = slot_attention
        self._write = write_rows(rows, kept)
        self._chunk_kernel = chunk_attention(rows, kept)
        self._keys = [as_numpy(keys) for keys in cache.keys]
        self._values = [as_numpy(values) for values in cache.values]

    def harmless(self, states: torch.Tensor) -> torch.Tensor:
        """Return keys or values as they are: these kernels give no weight to what a row does not see."""
        return states

    def cache_of(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and values of a layer, each (slots, kv_heads, max_len, dim)."""
        return self._keys[layer], self._values[layer]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, group: ChunkGroup) -> None:
        """Write the keys and values of chunks, each (kv_heads, rows, dim), to their slots."""
        rows = (as_numpy(key), as_numpy(value), self._keys[layer], self._values[layer])
        self._write(*rows, group.slots, group.positions)

    def attend_single(
        self, layer: int, states: States, rows: StepRows, out: torch.Tensor, terms: AttentionTerms
    ) -> None:
        """Write keys and values of the first rows to their slots; each row attends to its slot up to itself."""
        kept = self._keys[layer], self._values[layer]
        self._kernel(*map(as_numpy, states), *kept, rows.slots, rows.positions, as_numpy(out), terms.settings)

    def attend_chunk(
        self, states: States, span: SlotSpan, out: torch.Tensor, columns: SeenColumns, terms: AttentionTerms
    ) -> None:
        """query (heads, rows, dim), `span` of keys and values (slots, kv_heads, max_len, dim) -> out, by rows."""
        self._chunk_kernel(*map(as_numpy, states), span, columns, as_numpy(out), terms.settings)
