"""Attention over pages by the Triton kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from handlers.rolling_batch.attention.gpu_times import median_seconds
from handlers.rolling_batch.attention.terms import AttentionTerms, States
from handlers.rolling_batch.pages import cudnn, launch
from handlers.rolling_batch.pages.cache import PagedCache
from handlers.rolling_batch.pages.launch import PageLayer, Tuning, row_major
from handlers.rolling_batch.pages.projection import rotate_and_write
from handlers.rolling_batch.pages.rows import PageRows
from lmi_server.contract.errors import first_line

logger = logging.getLogger(__name__)


class TritonPages:
    """Reads keys and values where they are."""

    rotates = True

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._tuning = {device: Tuning.from_torch(device) for device in cache.tables}
        self._layers: dict[int, PageLayer] = {}
        self._by_cudnn: bool | None = None  # None: which is faster for prompts has not been measured yet

    def attend(self, layer: int, states: States, rows: PageRows, out: torch.Tensor, terms: AttentionTerms) -> None:
        """Write keys and values to pages; attend for the queries into `out`, by rows."""
        with torch.cuda.device_of(states.query):  # Triton launches on the current one
            keys, values = self._cache.keys[layer], self._cache.values[layer]
            tables = self._cache.tables[keys.device]
            shape = self._layer(layer, len(states.query), terms)
            states = States(*map(row_major, states))
            launch.write(states.key, states.value, keys, values, tables, rows.slots, rows.positions, shape)
            self._read(states, layer, rows, out, terms, shape)

    def attend_projected(
        self,
        layer: int,
        projected: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        heads: int,
        rows: PageRows,
        terms: AttentionTerms,
        chained: bool,
    ) -> torch.Tensor:
        """Rotate queries and keys, write keys and values to pages, and attend; see FlatAttention."""
        with torch.cuda.device_of(projected):
            keys, values = self._cache.keys[layer], self._cache.values[layer]
            shape = self._layer(layer, heads, terms)
            kept = (keys, values, self._cache.tables[keys.device], rows.slots, rows.positions)
            rotate_and_write(projected, cosines, sines, *kept, shape, chained)
            states = projected.view(len(projected), -1, shape.dim)
            parts = States(*states.split((heads, shape.kv_heads, shape.kv_heads), 1))
            out = rows.empty_or_zero(projected, (len(projected), heads, shape.value_dim))
            self._read(parts, layer, rows, out, terms, shape, chained)
            return out.flatten(1)

    def _read(
        self,
        states: States,
        layer: int,
        rows: PageRows,
        out: torch.Tensor,
        terms: AttentionTerms,
        shape: PageLayer,
        chained: bool = False,
    ) -> None:
        """Attend for queries (rows, heads, dim) into `out`; keys and values (rows, kv_heads, dim) are in pages already.

        Long chunks with no tokens before them may be attended without the pages, by cuDNN.
        """
        query = states.query
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        tables = self._cache.tables[query.device]
        more = (out, terms.scaling, shape, self._tuning[query.device], terms.sinks)
        if rows.decoding:
            places = rows.positions if rows.singles is None else rows.singles
            launch.decode(query, keys, values, tables, rows.slots, places, rows.decoding, *more, chained, rows.usual)
        if rows.chunks is None:
            return
        described, ends = rows.chunks, rows.ends_under(shape.window)

        def in_pages() -> None:
            launch.chunks(query, keys, values, tables, described, rows.longest, *more, ends)

        def at_once() -> None:
            cudnn.attend(states, rows.fresh, terms, out)

        shortest = min((end - begin for begin, end in rows.fresh), default=0)
        takes = ends is None and cudnn.takes(shape, terms, query.dtype, shortest, rows.longest)
        if takes and self._by_cudnn is None:
            self._by_cudnn = _is_faster(at_once, in_pages)
        (at_once if takes and self._by_cudnn else in_pages)()

    def _layer(self, layer: int, heads: int, terms: AttentionTerms) -> PageLayer:
        if layer not in self._layers:
            _, kv_heads, page, dim = self._cache.keys[layer].shape
            widths = (heads, kv_heads, dim, self._cache.values[layer].shape[3], page)
            scores = (terms.window, terms.chunk, terms.softcap, terms.sinks is not None)
            self._layers[layer] = PageLayer(*widths, *scores)
        return self._layers[layer]


def _is_faster(at_once: Callable[[], None], in_pages: Callable[[], None]) -> bool:
    """Measure both for the rows at hand; cuDNN may have no kernel for them."""
    try:
        seconds = median_seconds(at_once), median_seconds(in_pages)
    except RuntimeError as error:
        logger.info("cuDNN attends for no prompts: %s", first_line(error))
        return False
    logger.info("attention of a prompt takes %.0f us by cuDNN, %.0f us over pages", *(1e6 * took for took in seconds))
    return seconds[0] < seconds[1]
