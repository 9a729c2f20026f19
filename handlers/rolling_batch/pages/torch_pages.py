"""Attention over pages by torch's operators, which gather the pages of every row: for tests without a GPU."""

from __future__ import annotations

import torch

from handlers.rolling_batch.attention.terms import AttentionTerms, States
from handlers.rolling_batch.attention.torch_attention import SingleRows, attend, sinks_of
from handlers.rolling_batch.pages.cache import PagedCache
from handlers.rolling_batch.pages.rows import PageRows


class TorchPages:
    """The same method as `TritonPages`, for rows that are rotated already."""

    rotates = False

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def attend(self, layer: int, states: States, rows: PageRows, out: torch.Tensor, terms: AttentionTerms) -> None:
        """Write keys and values to pages; attend for the queries into `out`, by rows."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        tables, page, count = self._cache.tables[keys.device], self._cache.page, len(rows.slots)
        positions = rows.positions.long()
        own = tables[rows.slots.long(), positions // page].long()
        for kept, written in ((keys, states.key), (values, states.value)):
            # What is masked is read as well: a NaN of another sequence would make all outputs NaN.
            kept[own, :, positions % page] = torch.nan_to_num(written[:, :count], 0.0, 0.0, 0.0).transpose(0, 1)
        listed = tables[rows.slots.long(), : -(-rows.columns // page)].long()
        seen_keys, seen_values = (kept[listed].transpose(1, 2).flatten(2, 3) for kept in (keys, values))
        queries = states.query[:, :count].transpose(0, 1).unflatten(1, (keys.shape[1], -1))
        columns = SingleRows(rows.slots, positions, seen_keys.shape[2]).seen(terms.window, terms.chunk)
        if (ends := rows.ends_under(terms.window)) is not None:
            places = torch.arange(columns.shape[1], device=columns.device)
            columns = columns | ((places > positions[:, None]) & (places <= ends[:, None]))
        sinks = sinks_of(terms, keys.shape[1], 1)
        attended = attend(queries, seen_keys, seen_values, columns[:, None, None], terms, sinks)
        out[:count] = attended.flatten(1, 2)
