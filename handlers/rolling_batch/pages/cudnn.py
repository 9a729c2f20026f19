"""Attention of prompts by cuDNN, through torch: long chunks with nothing before them in the KV cache.

It reads keys and values of the pass itself, not of pages. On an H200 it takes two thirds of the time of `chunk_kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from handlers.rolling_batch.attention.terms import AttentionTerms, States
from handlers.rolling_batch.pages.launch import PageLayer

MIN_ROWS = 1024
"""Of a chunk. Lengths are padded to multiples of it: cuDNN plans for each length that it meets."""

_DTYPES = (torch.float16, torch.bfloat16)
_MAX_WIDTH, _WIDTH_STEP = 128, 8  # of a head


def takes(layer: PageLayer, terms: AttentionTerms, dtype: torch.dtype, shortest: int, longest: int) -> bool:
    """Whether it computes attention of such a layer, for chunks of `shortest` to `longest` rows."""
    same = layer.dim == layer.value_dim <= _MAX_WIDTH and not layer.dim % _WIDTH_STEP
    in_sight = not terms.window or longest <= terms.window
    plain = terms.is_plain and not terms.softcap and in_sight
    return same and plain and dtype in _DTYPES and shortest >= MIN_ROWS


def attend(states: States, spans: Sequence[tuple[int, int]], terms: AttentionTerms, out: torch.Tensor) -> None:
    """Attend for the rows of each span: queries (rows, heads, dim), keys and values (rows, kv_heads, dim).

    Raises RuntimeError if cuDNN has no kernel for them.
    """
    for begin, end in spans:
        queries, keys, values = (_padded(part[begin:end]).transpose(0, 1)[None] for part in states)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            attended = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=terms.scaling, enable_gqa=queries.shape[1] != keys.shape[1]
            )
        out[begin:end] = attended[0].transpose(0, 1)[: end - begin]


def _padded(states: torch.Tensor) -> torch.Tensor:
    """Return (rows, heads, dim) with zeros behind them; masked, these change nothing."""
    missing = -len(states) % MIN_ROWS
    return functional.pad(states, (0, 0, 0, 0, 0, missing)) if missing else states
