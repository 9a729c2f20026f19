"""Attention of prompts by FlashInfer, where it is installed: long chunks, with or without tokens before them.

It reads the same pages. Its plan of a step is made on the host, once for all layers of one shape. It compiles its
kernels when they are first needed: when the model loads, since a prompt of the largest step runs then.
"""

from __future__ import annotations

import importlib
import itertools
from importlib.util import find_spec
from typing import Any

import torch

from handlers.rolling_batch.attention.terms import AttentionTerms
from handlers.rolling_batch.pages.cache import PagedCache
from handlers.rolling_batch.pages.launch import PageLayer
from handlers.rolling_batch.pages.rows import PageRows

MIN_ROWS = 1024
"""Of a chunk."""

_DTYPES = (torch.float16, torch.bfloat16)
_WIDTHS = (64, 128, 256)  # of a head
_WORKSPACE = 2**27  # bytes


class FlashInferPrompts:
    """`library` is the package, or what stands for it."""

    def __init__(self, cache: PagedCache, library: Any) -> None:
        self._cache = cache
        self._library = library
        self._wrappers: dict[PageLayer, Any] = {}
        self._planned: dict[PageLayer, PageRows] = {}
        self._copied: torch.cuda.Event | None = None  # what the last plan copies to the device has arrived

    @classmethod
    def if_installed(cls, cache: PagedCache) -> FlashInferPrompts | None:
        """Return it if FlashInfer is installed and the cache is on one device."""
        if find_spec("flashinfer") is None or len(cache.tables) > 1:
            return None
        return cls(cache, importlib.import_module("flashinfer"))

    def takes(self, layer: PageLayer, terms: AttentionTerms, dtype: torch.dtype, rows: PageRows) -> bool:
        """Whether it computes attention of such a layer for the chunks of a pass."""
        long = bool(rows.described) and min(count for _, count, _, _ in rows.described) >= MIN_ROWS
        same = layer.dim == layer.value_dim and layer.dim in _WIDTHS
        return long and same and dtype in _DTYPES and terms.is_plain and rows.ends is None

    def attend(
        self,
        query: torch.Tensor,
        layer: int,
        rows: PageRows,
        terms: AttentionTerms,
        shape: PageLayer,
        out: torch.Tensor,
    ) -> None:
        """Attend for the chunks of a pass: query (rows, heads, dim) -> out, by rows."""
        if self._planned.get(shape) is not rows:
            self._plan(shape, rows, terms, query)
        span = slice(rows.described[0][0], rows.described[-1][0] + rows.described[-1][1])
        kept = (self._cache.keys[layer], self._cache.values[layer])
        self._wrappers[shape].run(query[span].contiguous(), kept, out=out[span])

    def _plan(self, shape: PageLayer, rows: PageRows, terms: AttentionTerms, query: torch.Tensor) -> None:
        device = query.device
        if shape not in self._wrappers:
            workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
            self._wrappers[shape] = self._library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        if self._copied is not None:
            self._copied.synchronize()  # the plan before may still be on its way
        table = self._cache.tables[device]
        ends = [start + count for _, count, start, _ in rows.described]
        pages = [-(-end // shape.page) for end in ends]
        listed = [table[slot, :count] for (_, _, _, slot), count in zip(rows.described, pages, strict=True)]
        self._wrappers[shape].plan(
            _numbers(itertools.accumulate((count for _, count, _, _ in rows.described), initial=0)),
            _numbers(itertools.accumulate(pages, initial=0)),
            torch.cat(listed),
            _numbers((end - 1) % shape.page + 1 for end in ends),
            shape.heads,
            shape.kv_heads,
            shape.dim,
            shape.page,
            causal=True,
            sm_scale=terms.scaling,
            window_left=shape.window - 1 if shape.window else -1,
            logits_soft_cap=terms.softcap or None,
            q_data_type=query.dtype,
            kv_data_type=query.dtype,
        )
        if device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._planned[shape] = rows


def _numbers(numbers: Any) -> torch.Tensor:
    """Return numbers in main memory, where a plan reads them."""
    return torch.tensor(list(numbers), dtype=torch.int32)
