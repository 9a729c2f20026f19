"""Decides whether a model has its KV cache in pages."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from handlers.rolling_batch.attention.kv_cache import LayerShape

PAGE = 32
"""Tokens of a page. In smaller ones less is left empty, larger ones take fewer entries of tables and fewer copies."""

_WIDEST = 256
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def page_size(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Return how many tokens a page has; 0 for slots, where the kernels for pages were never compiled."""
    on_gpus = torch.version.hip is None and all(layer.device.type == "cuda" for layer in layers)
    known = dtype in _DTYPES and all(max(layer.head_dim, layer.value_dim) <= _WIDEST for layer in layers)
    return PAGE if on_gpus and known and importlib.util.find_spec("triton") is not None else 0
