"""Attention by torch's own operators, on any device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from handlers.cpu_kernels.arguments import AttentionSettings, SeenColumns, SlotSpan
from handlers.rolling_batch.attention.kv_cache import KVCache
from handlers.rolling_batch.attention.rows import ChunkGroup, StepRows

MAX_SCORES = 2**26
"""The most scores (heads, rows, columns) that torch's operators compute at a time; they may keep all of them."""


@dataclass(eq=False)
class SingleRows:
    """Rows that attend one by one, as tensors on the device of a layer, and how many `columns` of the slots they read.

    `remembers`: masks are kept from layer to layer.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    columns: int
    remembers: bool = True
    _masks: dict[int, torch.Tensor] = field(default_factory=dict)  # by window

    @classmethod
    def from_rows(cls, rows: StepRows, device: torch.device) -> SingleRows:
        slots, positions = (torch.as_tensor(numbers, device=device) for numbers in (rows.slots, rows.positions))
        return cls(slots, positions, int(rows.positions.max()) + 1)

    def seen(self, window: int) -> torch.Tensor:
        """Return what each row sees, (rows, columns)."""
        mask = self._masks.get(window)
        if mask is None:
            mask = self._seen(window)
            if self.remembers:
                self._masks[window] = mask
        return mask

    def _seen(self, window: int) -> torch.Tensor:
        columns = torch.arange(self.columns, device=self.positions.device)
        seen = columns <= self.positions[:, None]
        return seen & (columns > self.positions[:, None] - window) if window else seen


class TorchAttention:
    """Decode rows are one padded batch over the slots in use."""

    single_area = 0

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._rows: StepRows | None = None
        self._singles: dict[torch.device, SingleRows] = {}  # of `_rows`

    def harmless(self, states: torch.Tensor) -> torch.Tensor:
        """Return keys or values with zeros in place of what is not finite.

        torch's operators also read what is masked, with a weight of zero. A NaN of a former sequence in the slot would
        make all outputs of the next sequence NaN.
        """
        return torch.nan_to_num(states, nan=0.0, posinf=0.0, neginf=0.0)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, group: ChunkGroup) -> None:
        """Write the keys and values of chunks, each (kv_heads, rows, dim), to their slots."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        for chunk in group.chunks:
            rows = slice(chunk.first - group.rows.start, chunk.last - group.rows.start)
            keys[chunk.slot, :, chunk.start : chunk.end] = key[:, rows]
            values[chunk.slot, :, chunk.start : chunk.end] = value[:, rows]

    def attend_single(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: StepRows,
        out: torch.Tensor,
        settings: AttentionSettings,
    ) -> None:
        """Write keys and values of the first rows to their slots; each row attends to its slot up to itself."""
        count = len(rows.slots)
        single = self._single(rows, self._cache.keys[layer].device)
        out[:count] = self.attend_rows(layer, query[:, :count], key[:, :count], value[:, :count], single, settings)

    def _single(self, rows: StepRows, device: torch.device) -> SingleRows:
        """Return the rows of a pass for a device: copied there once, not in every layer."""
        if rows is not self._rows:
            self._rows, self._singles = rows, {}
        if device not in self._singles:
            self._singles[device] = SingleRows.from_rows(rows, device)
        return self._singles[device]

    def attend_rows(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: SingleRows,
        settings: AttentionSettings,
    ) -> torch.Tensor:
        """Query (heads, rows, dim), keys and values (kv_heads, rows, dim) -> (rows, heads, value_dim)."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        # Written before it is read: several rows may be tokens of one slot, and each sees the earlier ones.
        keys[rows.slots, :, rows.positions] = key.transpose(0, 1)
        values[rows.slots, :, rows.positions] = value.transpose(0, 1)
        queries = query.transpose(0, 1).unflatten(1, (keys.shape[1], -1))
        keys, values = (area[rows.slots, :, : rows.columns] for area in (keys, values))
        seen = rows.seen(settings.window)[:, None, None]
        return _attention(queries, keys, values, seen, settings).flatten(1, 2)

    def attend_chunk(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        span: SlotSpan,
        out: torch.Tensor,
        columns: SeenColumns,
        settings: AttentionSettings,
    ) -> None:
        """query (heads, rows, dim), `span` of keys and values (slots, kv_heads, max_len, dim) -> out, by rows."""
        keys, values = (kept[span.slot, :, span.first : span.last] for kept in (keys, values))
        grouped = query.unflatten(0, (keys.shape[0], -1))  # a group of heads shares keys and values
        shared = (keys.shape[0], grouped.shape[1], -1, -1)
        keys, values = keys[:, None].expand(shared), values[:, None].expand(shared)
        rows = query.shape[1]
        step = max(1, MAX_SCORES // (query.shape[0] * keys.shape[2]))
        for block in (slice(first, first + step) for first in range(0, rows, step)):
            seen = _seen_columns(columns, block, keys.shape[2], settings.window, keys.device)
            attended = _attention(grouped[:, :, block], keys, values, seen, settings)
            out[block] = attended.flatten(0, 1).transpose(0, 1)


def _seen_columns(columns: SeenColumns, block: slice, count: int, window: int, device: torch.device) -> torch.Tensor:
    """Return which of `count` columns the rows of `block` see, (rows, columns)."""
    first, last = (torch.as_tensor(own[block], device=device)[:, None] for own in (columns.first_own, columns.last_own))
    column = torch.arange(count, device=device)
    shared = column < columns.start - columns.begin
    seen = shared | ((column >= first) & (column < last))
    if window:
        token = torch.where(shared, columns.begin + column, columns.start + column - first)
        seen &= token >= columns.start + last - first - window
    return seen


def _attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, settings: AttentionSettings
) -> torch.Tensor:
    if not settings.softcap:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=settings.scaling)
    scores = torch.matmul(query, keys.transpose(-1, -2)) * settings.scaling
    scores = settings.softcap * torch.tanh(scores / settings.softcap)
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1, dtype=torch.float32)
    return torch.matmul(weights.to(values.dtype), values)
