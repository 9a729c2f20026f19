"""Attention over pages by the Triton kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from handlers.rolling_batch.attention.gpu_times import median_seconds
from handlers.rolling_batch.attention.terms import AttentionTerms
from handlers.rolling_batch.pages import cudnn, launch
from handlers.rolling_batch.pages.cache import PagedCache
from handlers.rolling_batch.pages.flashinfer_prompts import FlashInferPrompts
from handlers.rolling_batch.pages.launch import PageLayer, Tuning, row_major
from handlers.rolling_batch.pages.projection import rotate_and_write
from handlers.rolling_batch.pages.rows import PageRows
from lmi_server.contract.errors import first_line

logger = logging.getLogger(__name__)

_PAGES = "the kernel for pages"
_LIMIT = 2e-2  # of the largest value


class TritonPages:
    """Reads keys and values where they are."""

    rotates = True

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._tuning = {device: Tuning.from_torch(device) for device in cache.tables}
        self._layers: dict[int, PageLayer] = {}
        self._flashinfer = FlashInferPrompts.if_installed(cache)
        self._fastest: dict[tuple[PageLayer, tuple[str, ...]], str] = {}  # of some ways to attend for prompts

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
        with torch.cuda.device_of(query):  # Triton launches on the current one
            keys, values = self._cache.keys[layer], self._cache.values[layer]
            tables = self._cache.tables[keys.device]
            shape = self._layer(layer, query.shape[0], terms)
            query, key, value = row_major(query), row_major(key), row_major(value)
            launch.write(key, value, keys, values, tables, rows.slots, rows.positions, shape)
            self._read(query, key, value, layer, rows, out, terms, shape)

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
            query, key, value = states.split((heads, shape.kv_heads, shape.kv_heads), 1)
            out = rows.empty_or_zero(projected, (len(projected), heads, shape.value_dim))
            self._read(query, key, value, layer, rows, out, terms, shape, chained)
            return out.flatten(1)

    def _read(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        rows: PageRows,
        out: torch.Tensor,
        terms: AttentionTerms,
        shape: PageLayer,
        chained: bool = False,
    ) -> None:
        """Attend for query (rows, heads, dim) into `out`; keys and values, (rows, kv_heads, dim), are in pages already.

        Long chunks may be attended by FlashInfer, and with no tokens before them from `key` and `value` by cuDNN.
        """
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
            cudnn.attend(query, key, value, rows.fresh, terms, out)

        def by_flashinfer() -> None:
            assert self._flashinfer is not None
            self._flashinfer.attend(query, layer, rows, terms, shape, out)

        ways = {_PAGES: in_pages}
        shortest = min((end - begin for begin, end in rows.fresh), default=0)
        if ends is None and cudnn.takes(shape, terms, query.dtype, shortest, rows.longest):
            ways["cuDNN"] = at_once
        if self._flashinfer is not None and self._flashinfer.takes(shape, terms, query.dtype, rows):
            ways["FlashInfer"] = by_flashinfer
        case = (shape, tuple(ways))
        if len(ways) > 1 and case not in self._fastest:
            self._fastest[case] = fastest(ways, out)
        ways[self._fastest.get(case, _PAGES)]()

    def _layer(self, layer: int, heads: int, terms: AttentionTerms) -> PageLayer:
        if layer not in self._layers:
            _, kv_heads, page, dim = self._cache.keys[layer].shape
            widths = (heads, kv_heads, dim, self._cache.values[layer].shape[3], page)
            scores = (terms.window, terms.chunk, terms.softcap, terms.sinks is not None)
            self._layers[layer] = PageLayer(*widths, *scores)
        return self._layers[layer]


def fastest(
    ways: Mapping[str, Callable[[], None]],
    out: torch.Tensor,
    seconds: Callable[[Callable[[], None]], float] = median_seconds,
) -> str:
    """Return the fastest of some ways to compute `out`. The first one is always right.

    Others may have no kernel for the rows at hand, or no compiler for one, or compute something else.
    """
    took: dict[str, float] = {}
    expected: torch.Tensor | None = None
    for name, run in ways.items():
        try:
            took[name] = seconds(run)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, OSError) as error:
            if expected is None:
                raise
            logger.info("attention of prompts not by %s: %s", name, first_line(error))
            continue
        if expected is None:
            expected = out.clone()
        elif not bool((out - expected).abs().amax() <= _LIMIT * expected.abs().amax()):
            logger.warning("attention of prompts not by %s: it computes something else", name)
            del took[name]
    logger.info(
        "attention of a prompt takes %s", ", ".join(f"{1e6 * own:.0f} us by {name}" for name, own in took.items())
    )
    return min(took, key=took.__getitem__)
