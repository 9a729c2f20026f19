"""Attention over pages by the Triton kernels."""

from __future__ import annotations

import torch

from handlers.rolling_batch.attention.terms import AttentionTerms
from handlers.rolling_batch.pages import launch
from handlers.rolling_batch.pages.cache import PagedCache
from handlers.rolling_batch.pages.launch import PageLayer, Tuning, row_major
from handlers.rolling_batch.pages.rows import PageRows


class TritonPages:
    """Reads keys and values where they are."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._tuning = {device: Tuning.from_torch(device) for device in cache.tables}
        self._layers: dict[int, PageLayer] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: PageRows,
        out: torch.Tensor,
        terms: AttentionTerms,
    ) -> None:
        """Write keys and values, (kv_heads, rows, dim), to pages; query (heads, rows, dim) -> out, by rows."""
        with torch.cuda.device(query.device):  # Triton launches on the current one
            keys, values = self._cache.keys[layer], self._cache.values[layer]
            tables = self._cache.tables[keys.device]
            shape = self._layer(layer, query.shape[0], terms)
            query, key, value = row_major(query), row_major(key), row_major(value)
            launch.write(key, value, keys, values, tables, rows.slots, rows.positions, shape)
            more = (out, terms.scaling, shape, self._tuning[keys.device], terms.sinks)
            if rows.decoding:
                launch.decode(query, keys, values, tables, rows.slots, rows.positions, rows.decoding, *more)
            if rows.chunks is not None:
                launch.chunks(query, keys, values, tables, rows.chunks, rows.longest, *more)

    def _layer(self, layer: int, heads: int, terms: AttentionTerms) -> PageLayer:
        if layer not in self._layers:
            _, kv_heads, page, dim = self._cache.keys[layer].shape
            widths = (heads, kv_heads, dim, self._cache.values[layer].shape[3], page)
            scores = (terms.window, terms.chunk, terms.softcap, terms.sinks is not None)
            self._layers[layer] = PageLayer(*widths, *scores)
        return self._layers[layer]
