"""Attention of one flat forward pass over the slots of the KV cache, as an attention function of transformers.

transformers calls the function that is registered under the model's `attn_implementation` in every layer, with the
layer's queries, keys and values (its documented AttentionInterface). The pass holds one token of each decoding
sequence, then the prompt chunks. All of them share the projections and the MLP as rows of one matrix; only here do they
part, and each attends to its own slot.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AttentionInterface

from handlers.checkpoints.placement import main_device
from handlers.cpu_kernels.arguments import AttentionSettings, SeenColumns, SlotSpan
from handlers.cpu_kernels.arrays import as_numpy
from handlers.rolling_batch.attention.kv_cache import KVCache, LayerShape


@dataclass(frozen=True)
class ChunkRows:
    """Rows `first:last` of the pass are tokens `start:end` of the sequence in `slot`.

    `source` is the slot that holds the tokens before `start`: `slot` itself, or one from which they are copied after
    this step.
    """

    slot: int
    start: int
    end: int
    first: int
    last: int
    source: int


@dataclass(frozen=True)
class StepRows:
    """What the rows of the pass are: row i is token `positions[i]` of `slots[i]`; the rows of `chunks` follow."""

    slots: np.ndarray
    positions: np.ndarray
    chunks: list[ChunkRows]


class UnsupportedAttentionError(Exception):
    """The model's attention needs an input that the slotted KV cache does not provide. The message names it."""


class SlotAttention:
    """An attention function; `begin` sets what the next forward pass holds.

    Queries (1, heads, rows, dim), keys and values (1, kv_heads, rows, dim) -> ((1, rows, heads, value_dim), None).
    """

    def __init__(self, cache: KVCache, name: str) -> None:
        self._cache = cache
        self._operators = _operators(cache)
        self._threads = torch.get_num_threads()
        self._rows = StepRows(np.empty(0, np.int64), np.empty(0, np.int64), [])
        self._groups: list[_ChunkGroup] = []
        self._decoding: SingleRows | None = None
        AttentionInterface.register(name, self)

    def row_by_row(self, start: int, end: int) -> bool:
        """Whether a chunk of tokens `start:end` attends row by row, like decode rows, rather than as one product."""
        return (end - start) * end <= self._operators.single_area

    def begin(self, rows: StepRows) -> None:
        """Set what the rows of the next forward pass are."""
        self._rows = rows
        self._groups = _groups(rows.chunks)
        self._decoding = None

    def begin_decoding(self, rows: SingleRows) -> None:
        """Set the rows of the next forward passes, all of which decode; only without kernels."""
        self._decoding = rows

    @property
    def has_kernels(self) -> bool:
        """Whether the compiled CPU kernels attend, and not torch's operators."""
        return isinstance(self._operators, _KernelAttention)

    def kept(self, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return a layer's keys and values as the kernels see them; None if the kernels do not support this cache."""
        return self._operators.kept(layer) if isinstance(self._operators, _KernelAttention) else None

    def single_rows(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return slots and positions of all rows; None if some rows belong to chunks."""
        if self._groups or not len(self._rows.slots):
            return None
        return self._rows.slots, self._rows.positions

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        settings = AttentionSettings(float(scaling), int(sliding_window or 0), float(softcap or 0.0), self._threads)
        layer: int = module.layer_idx
        key, value = self._operators.harmless(key), self._operators.harmless(value)
        if self._decoding is not None:
            assert isinstance(self._operators, _TorchAttention)
            rows = (query[0], key[0], value[0], self._decoding)
            return self._operators.attend_rows(layer, *rows, settings).unsqueeze(0), None
        out = query.new_zeros((query.shape[2], query.shape[1], value.shape[3]))  # padding rows stay zero
        if len(self._rows.slots):
            self._operators.attend_single(layer, query[0], key[0], value[0], self._rows, out, settings)
        for group in self._groups:
            self._prefill(layer, group, query[0], key[0], value[0], out, settings)
        return out.unsqueeze(0), None

    def _prefill(
        self,
        layer: int,
        group: _ChunkGroup,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        settings: AttentionSettings,
    ) -> None:
        """Attend for the chunks of a group: each row to the tokens that the group shares, and to its own sequence's.

        If those tokens are still in another slot, keys and values are those of that slot with the group's own behind
        them: the copy to the slots of the group can then wait until after this step, when nobody waits for it.
        """
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        self._operators.write(layer, key[:, group.rows], value[:, group.rows], group)
        first, rows, columns = group.chunks[0], group.rows, group.columns(settings.window)
        span = SlotSpan(first.slot, columns.begin, first.end)
        if first.source != first.slot:
            before = (slice(first.source, first.source + 1), slice(None), slice(columns.begin, first.start))
            keys, values = (
                torch.cat((kept[before], own[None, :, rows]), 2) for kept, own in ((keys, key), (values, value))
            )
            span = SlotSpan(0, 0, keys.shape[2])
        self._operators.attend_chunk(query[:, rows], keys, values, span, out[rows], columns, settings)


class _ChunkGroup:
    """Chunks next to each other in the pass that continue from the same prefix, as one chunk for the kernels."""

    def __init__(self, chunks: list[ChunkRows]) -> None:
        self.chunks = chunks
        self.rows = slice(chunks[0].first, chunks[-1].last)
        self._lengths = [chunk.end - chunk.start for chunk in chunks]
        self.slots = np.repeat([chunk.slot for chunk in chunks], self._lengths)
        self.positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        self._columns: dict[int, SeenColumns] = {}  # by window: the layers of a model have one or two different ones

    def columns(self, window: int) -> SeenColumns:
        """Return what each row sees under a window."""
        if window not in self._columns:
            self._columns[window] = SeenColumns.of(self._lengths, self.chunks[0].start, window)
        return self._columns[window]


def _groups(chunks: list[ChunkRows]) -> list[_ChunkGroup]:
    """Group neighbouring chunks that continue from the same tokens of one slot."""

    def prefix_of(chunk: ChunkRows) -> tuple[int, int, bool]:
        own = chunk.source == chunk.slot  # the sequence in the source itself, whose own tokens lie in that slot
        return chunk.source, chunk.start, own

    return [_ChunkGroup(list(group)) for _, group in itertools.groupby(chunks, prefix_of)]


def _operators(cache: KVCache) -> _KernelAttention | _TorchAttention:
    keys = cache.keys[0]
    if keys.device.type == "cpu" and keys.dtype in (torch.bfloat16, torch.float32):
        return _KernelAttention(cache)
    return _TorchAttention(cache)


class _KernelAttention:
    """Attention by the compiled CPU kernels."""

    # Rows times tokens seen, up to which a chunk is faster row by row: a product of tiles first copies keys and values
    # to another layout, which pays off only if enough rows share them.
    single_area = 2048

    def __init__(self, cache: KVCache) -> None:
        from handlers.cpu_kernels.attention import slot_attention, write_rows
        from handlers.cpu_kernels.chunk_attention import chunk_attention

        dtype = as_numpy(cache.keys[0]).dtype
        self._kernel = slot_attention
        self._write = write_rows(dtype)
        self._chunk_kernel = chunk_attention(dtype)
        self._keys = [as_numpy(keys) for keys in cache.keys]
        self._values = [as_numpy(values) for values in cache.values]

    def harmless(self, states: torch.Tensor) -> torch.Tensor:
        """Return keys or values as they are: these kernels give no weight to what a row does not see."""
        return states

    def kept(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and values of a layer, each (slots, kv_heads, max_len, dim)."""
        return self._keys[layer], self._values[layer]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, group: _ChunkGroup) -> None:
        """Write the keys and values of chunks, each (kv_heads, rows, dim), to their slots."""
        rows = (as_numpy(key), as_numpy(value), self._keys[layer], self._values[layer])
        self._write(*rows, group.slots, group.positions)

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
        rows_of_layer = (as_numpy(query), as_numpy(key), as_numpy(value))
        kept = self._keys[layer], self._values[layer]
        self._kernel(*rows_of_layer, *kept, rows.slots, rows.positions, as_numpy(out), settings)

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
        kept = as_numpy(keys), as_numpy(values)
        self._chunk_kernel(as_numpy(query), *kept, span, columns, as_numpy(out), settings)


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
    def of(cls, rows: StepRows, device: torch.device) -> SingleRows:
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


MAX_SCORES = 2**26
"""The most scores (heads, rows, columns) that torch's operators compute at a time; they may keep all of them."""


class _TorchAttention:
    """Attention by torch's own operators; decode rows are one padded batch over the slots in use."""

    single_area = 0

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._rows: StepRows | None = None
        self._singles: dict[torch.device, SingleRows] = {}  # of `_rows`

    def harmless(self, states: torch.Tensor) -> torch.Tensor:
        """Return keys or values with zeros in place of what is not finite.

        torch's operators also read what is masked, and give it the weight zero: a NaN or an infinity that one sequence
        leaves behind in a slot would make all outputs of the next one NaN.
        """
        return torch.nan_to_num(states, nan=0.0, posinf=0.0, neginf=0.0)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, group: _ChunkGroup) -> None:
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
            self._singles[device] = SingleRows.of(rows, device)
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
        # Written before it is read: several rows may be tokens of one slot, each of which sees those before it.
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


@dataclass(frozen=True)
class AttentionLayer:
    """An attention module, what it keeps per token, and how it calls its attention function."""

    module: Any
    shape: LayerShape
    settings: dict[str, Any]


def probe_layers(model: Any, name: str) -> list[AttentionLayer]:
    """Run one token through `model` and return its attention layers in order.

    The attention function that records the calls shows, for any architecture, what its layers keep per token and what
    else they ask for. Raises UnsupportedAttentionError if a layer does not call it, or needs more than queries, keys,
    values, a window and a soft cap.
    """
    layers: dict[int, AttentionLayer] = {}

    def record(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        extra = [name for name in ("s_aux", "sinks", "position_bias", "alibi") if more.get(name) is not None]
        extra += ["a mask of its own"] if attention_mask is not None else []
        extra += [f"{key.dtype} keys in a {model.dtype} model"] if key.dtype != model.dtype else []
        if extra:
            raise UnsupportedAttentionError(f"{type(module).__name__} attends with {extra[0]}")
        shape = LayerShape(key.shape[1], key.shape[3], value.shape[3], key.device)
        settings = {name: more.get(name) for name in ("scaling", "sliding_window", "softcap")}
        layers[module.layer_idx] = AttentionLayer(module, shape, settings)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(name, record)
    model.set_attn_implementation(name)
    device = main_device(model)
    with torch.inference_mode():
        model(
            input_ids=torch.zeros((1, 1), dtype=torch.long, device=device),
            position_ids=torch.zeros((1, 1), dtype=torch.long, device=device),
            use_cache=False,
        )
    if sorted(layers) != list(range(len(layers))) or not layers:
        raise UnsupportedAttentionError(f"{type(model).__name__} does not use transformers' attention interface")
    if len(layers) != model.config.get_text_config().num_hidden_layers or getattr(model, "_is_stateful", False):
        raise UnsupportedAttentionError(f"{type(model).__name__} keeps states beside the keys and values of attention")
    return [layers[index] for index in range(len(layers))]
