"""A cache of transformers whose keys and values lie in the slots of the rolling batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from handlers.rolling_batch.attention.kv_cache import KVCache, LayerShape
from handlers.rolling_batch.attention.probe import UnsupportedAttentionError

_KINDS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)


@dataclass(frozen=True)
class CachedLayer:
    """A model's data per token in one layer of its cache, and their areas of the KV cache.

    `index_area`: where the keys of an index are, which chooses the tokens to attend to (DeepSeek V3.2); their first
    half counts as keys there, the other one as values.
    """

    area: int
    is_sliding: bool
    index_area: int | None


@dataclass(frozen=True)
class CacheLayout:
    """The layers of a model's cache, and the shape of each area of the KV cache for them."""

    layers: list[CachedLayer]
    shapes: list[LayerShape]


def cache_layout(cache: DynamicCache, dtype: torch.dtype) -> CacheLayout:
    """Return the layout of what a model has left in `cache`. Raises UnsupportedAttentionError."""
    layers: list[CachedLayer] = []
    shapes: list[LayerShape] = []
    for number, layer in enumerate(cache.layers):
        if type(layer) not in _KINDS:
            raise UnsupportedAttentionError(f"it keeps a {type(layer).__name__}, and not only keys and values")
        if not layer.is_initialized:
            raise UnsupportedAttentionError(f"it keeps no keys and values in layer {number} of its cache")
        if layer.keys.dtype != dtype or layer.values.dtype != dtype:
            raise UnsupportedAttentionError(f"it keeps {layer.keys.dtype} keys in a {dtype} model")
        area, index_area = len(shapes), None
        heads, _, dim = layer.keys.shape[1:]
        shapes.append(LayerShape(heads, dim, layer.values.shape[3], layer.keys.device))
        index = getattr(layer, "indexer_keys", None)
        if index is not None:
            index_area = len(shapes)
            shapes.append(LayerShape(1, index.shape[2] // 2, index.shape[2] - index.shape[2] // 2, index.device))
        layers.append(CachedLayer(area, bool(layer.is_sliding), index_area))
    if not layers:
        raise UnsupportedAttentionError("it keeps no keys and values in a cache of transformers")
    return CacheLayout(layers, shapes)


class CalledSequences:
    """The sequences of one call of the model: row i goes on in `slots[i]`, behind `past[i]` tokens.

    Several sequences have one new token each. Shorter ones are padded on their left, as in a batch of `generate`.
    """

    def __init__(self, slots: Sequence[int], past: Sequence[int], new: int) -> None:
        assert new == 1 or len(slots) == 1, "only sequences with one new token share a call"
        self.slots, self.past, self.new = list(slots), list(past), new
        self.length = max(past)  # of the cache, as the model sees it
        self._indices: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def mask(self, device: torch.device) -> torch.Tensor | None:
        """Return which columns are no padding, (sequences, columns); None if all are."""
        if len(self.slots) == 1:
            return None
        columns = torch.arange(self.length + 1, device=device)
        pads = self.length - torch.tensor(self.past, device=device)
        return (columns >= pads[:, None]).long()

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return the positions of the new tokens, (sequences, new)."""
        return torch.tensor(self.past, device=device)[:, None] + torch.arange(self.new, device=device)

    def extend(self, area: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Write the states of new tokens, (sequences, heads, new, dim), to their slots; return those of all tokens.

        `area` is (slots, heads, columns, dim). The result is (sequences, heads, length + new, dim).
        """
        if len(self.slots) == 1:
            slot, end = self.slots[0], self.length + self.new
            area[slot, :, self.length : end] = states[0]
            return area[slot : slot + 1, :, :end].contiguous()  # as transformers' caches: a model may view it otherwise
        slots, past, columns = self._on(area.device)
        area[slots, :, past] = states[:, :, 0]
        return area[slots[:, None], :, columns].transpose(1, 2).contiguous()

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return slots, tokens before the new one, and the column of each place; padding reads the first column."""
        if device not in self._indices:
            slots, past = (torch.tensor(numbers, device=device) for numbers in (self.slots, self.past))
            columns = torch.arange(self.length + 1, device=device) - (self.length - past)[:, None]
            self._indices[device] = slots, past, columns.clamp(min=0)
        return self._indices[device]


class _SlotLayer(CacheLayerMixin):
    """A layer of a SlotCache. It gives all tokens, also to sliding attention: the mask has the window."""

    def __init__(self, layer: CachedLayer, cache: KVCache, called: CalledSequences) -> None:
        super().__init__()
        self.is_sliding = layer.is_sliding
        self.is_initialized = True
        self._layer, self._cache, self._called = layer, cache, called

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of the new tokens; return those of all tokens."""
        kept = self._cache.keys[self._layer.area], self._cache.values[self._layer.area]
        return self._called.extend(kept[0], key_states), self._called.extend(kept[1], value_states)

    def update_indexer(self, states: torch.Tensor) -> torch.Tensor:
        """Write the index keys of the new tokens, (sequences, new, dim); return those of all tokens."""
        area = self._layer.index_area
        assert area is not None
        half = self._cache.keys[area].shape[3]
        parts = (self._cache.keys[area], states[..., :half]), (self._cache.values[area], states[..., half:])
        return torch.cat([self._called.extend(kept, part[:, None])[:, 0] for kept, part in parts], dim=-1)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the slots are there."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns attention sees, and the number of the first one."""
        return self._called.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many columns come before the new tokens."""
        return self._called.length

    def get_max_length(self) -> int:
        """Return that a sequence may grow."""
        return -1


class SlotCache(Cache):
    """The cache that a model is called with for some sequences of a pass."""

    def __init__(self, layout: CacheLayout, cache: KVCache, called: CalledSequences) -> None:
        super().__init__(layers=[_SlotLayer(layer, cache, called) for layer in layout.layers])
