"""Attention by torch's own operators, on any device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional

from handlers.cpu_kernels.arguments import SeenColumns, SlotSpan
from handlers.rolling_batch.attention.kv_cache import KVCache, unpack_rows
from handlers.rolling_batch.attention.rows import ChunkGroup, StepRows
from handlers.rolling_batch.attention.terms import AttentionTerms, States
from handlers.rolling_batch.device_arrays import upload

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
    _masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # by window and chunk

    @classmethod
    def from_rows(cls, rows: StepRows, device: torch.device) -> SingleRows:
        slots, positions = (upload(numbers, device) for numbers in (rows.slots, rows.positions))
        return cls(slots, positions, int(rows.positions.max()) + 1)

    def seen(self, window: int, chunk: int) -> torch.Tensor:
        """Return what each row sees, (rows, columns)."""
        mask = self._masks.get((window, chunk))
        if mask is None:
            mask = self._seen(window, chunk)
            if self.remembers:
                self._masks[window, chunk] = mask
        return mask

    def _seen(self, window: int, chunk: int) -> torch.Tensor:
        columns = torch.arange(self.columns, device=self.positions.device)
        positions = self.positions[:, None]
        seen = columns <= positions
        if chunk:
            seen &= columns >= positions // chunk * chunk
        return seen & (columns > positions - window) if window else seen


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
        self, layer: int, states: States, rows: StepRows, out: torch.Tensor, terms: AttentionTerms
    ) -> None:
        """Write keys and values of the first rows to their slots; each row attends to its slot up to itself."""
        count = len(rows.slots)
        single = self._single(rows, self._cache.keys[layer].device)
        out[:count] = self.attend_rows(layer, States(*(part[:, :count] for part in states)), single, terms)

    def _single(self, rows: StepRows, device: torch.device) -> SingleRows:
        """Return the rows of a pass for a device: copied there once, not in every layer."""
        if rows is not self._rows:
            self._rows, self._singles = rows, {}
        if device not in self._singles:
            self._singles[device] = SingleRows.from_rows(rows, device)
        return self._singles[device]

    def attend_rows(self, layer: int, states: States, rows: SingleRows, terms: AttentionTerms) -> torch.Tensor:
        """Return attended values, (rows, heads, value_dim)."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        # Written before it is read: several rows may be tokens of one slot, and each sees the earlier ones.
        keys[rows.slots, :, rows.positions] = states.key.transpose(0, 1)
        values[rows.slots, :, rows.positions] = states.value.transpose(0, 1)
        queries = states.query.transpose(0, 1).unflatten(1, (keys.shape[1], -1))
        keys, values = (area[rows.slots, :, : rows.columns] for area in (keys, values))
        seen = rows.seen(terms.window, terms.chunk)[:, None, None]
        return attend(queries, keys, values, seen, terms, sinks_of(terms, keys.shape[1], 1)).flatten(1, 2)

    def attend_chunk(
        self,
        states: States,
        span: SlotSpan,
        out: torch.Tensor,
        columns: SeenColumns,
        terms: AttentionTerms,
        ends: np.ndarray | None = None,
    ) -> None:
        """query (heads, rows, dim), `span` of keys and values (slots, kv_heads, max_len, dim) -> out, by rows.

        Each row sees the columns before `ends`, if these are not those of its own token.
        """
        query, *kept = states
        keys, values = (unpack_rows(own[span.slot, :, span.first : span.last], query.dtype) for own in kept)
        grouped = query.unflatten(0, (keys.shape[0], -1))  # a group of heads shares keys and values
        shared = (keys.shape[0], grouped.shape[1], -1, -1)
        keys, values = keys[:, None].expand(shared), values[:, None].expand(shared)
        rows = query.shape[1]
        sinks = sinks_of(terms, keys.shape[0], 2)
        step = max(1, MAX_SCORES // (query.shape[0] * keys.shape[2]))
        for block in (slice(first, first + step) for first in range(0, rows, step)):
            seen = _seen_columns(columns, block, keys.shape[2], terms, keys.device, ends)
            attended = attend(grouped[:, :, block], keys, values, seen, terms, sinks)
            out[block] = attended.flatten(0, 1).transpose(0, 1)


def _seen_columns(
    columns: SeenColumns,
    block: slice,
    count: int,
    terms: AttentionTerms,
    device: torch.device,
    ends: np.ndarray | None,
) -> torch.Tensor:
    """Return which of `count` columns the rows of `block` see, (rows, columns)."""
    first, last = (upload(own[block], device)[:, None] for own in (columns.first_own, columns.last_own))
    column = torch.arange(count, device=device)
    shared = column < columns.start - columns.begin
    end = last if ends is None else torch.as_tensor(ends[block], device=device)[:, None]
    seen = shared | ((column >= first) & (column < end))
    if terms.window or terms.chunk:
        token = torch.where(shared, columns.begin + column, columns.start + column - first)
        own = columns.start + last - first - 1
        if terms.window:
            seen &= token > own - terms.window
        if terms.chunk:
            seen &= token >= own // terms.chunk * terms.chunk
    return seen


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    terms: AttentionTerms,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Query (..., rows, dim), keys and values (..., columns, dim); mask and sinks broadcast to (..., rows, columns)."""
    if not terms.softcap and sinks is None:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=terms.scaling)
    scores = torch.matmul(query, keys.transpose(-1, -2)) * terms.scaling
    if terms.softcap:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    scores = scores.float().masked_fill(~mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:  # softmax with one more score, whose weight is dropped
        weights *= torch.sigmoid(torch.logsumexp(scores, dim=-1, keepdim=True) - sinks)
    return torch.matmul(weights.to(values.dtype), values)


def sinks_of(terms: AttentionTerms, kv_heads: int, dimensions: int) -> torch.Tensor | None:
    """Return the sinks by groups of heads, (kv_heads, group, 1, ...) with so many further dimensions."""
    if terms.sinks is None:
        return None
    return terms.sinks.float().view(kv_heads, -1, *[1] * dimensions)
