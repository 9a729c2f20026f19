"""All decoder layers of a model of Llama's structure in one call."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import numpy as np

from handlers.rolling_batch.cpu_kernels.arguments import AttentionSettings, LayerArrays
from handlers.rolling_batch.cpu_kernels.attention import slot_attention
from handlers.rolling_batch.cpu_kernels.compilation import kernel, kernel_part
from handlers.rolling_batch.cpu_kernels.intrinsics import array_at, heads_of, load, reshaped, store
from handlers.rolling_batch.cpu_kernels.linear import linear
from handlers.rolling_batch.cpu_kernels.rows import rms_norm, rotate, silu_and_mul
from handlers.rolling_batch.cpu_kernels.shared_memory import all_reduce


@kernel_part(fastmath=True)
def _add_rows(rows, added, shared):
    """Add `added`, or the sum of all ranks' if the model is split, to `rows`: (n, width) uint16 both."""
    if len(shared.blocks) > 1:
        every = reshaped(added, (added.size,))
        all_reduce(every, every, shared)
    for n in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            rows[n, d] = store(load(rows[n, d]) + load(added[n, d]), rows[n, d])


@kernel_part(inline="always")  # as a kernel of its own LLVM would compile it, with all kernels that it calls, twice
def _decoder_layer(rows, layer, window, settings, shared):
    """Compute one layer, for LayerArrays of it and the `window` that it sees."""
    hidden, threads = rows.hidden, settings.threads
    count, width = hidden.shape
    dim, kv_heads, inner = layer.keys.shape[3], layer.keys.shape[1], layer.down.shape[1] * 2
    heads = layer.o.shape[1] * 2 // dim
    normed, added = np.empty((count, width), np.uint16), np.empty((count, width), np.uint16)
    rms_norm(hidden, layer.norm, settings.epsilon, normed)
    projected = np.empty((count, (heads + 2 * kv_heads) * dim), np.uint16)
    linear(normed, layer.qkv, layer.qkv_bias, projected, threads)
    rotate(projected, rows.cosines, rows.sines, heads + kv_heads)
    by_head = heads_of(projected, dim)
    query, key, value = by_head[:heads], by_head[heads : heads + kv_heads], by_head[heads + kv_heads :]
    attended = np.zeros((count, heads, dim), np.uint16)
    attention = AttentionSettings(settings.scaling, window, settings.softcap, threads)
    slot_attention(query, key, value, layer.keys, layer.values, rows.slots, rows.positions, attended, attention)
    linear(reshaped(attended, (count, heads * dim)), layer.o, layer.o_bias, added, threads)
    _add_rows(hidden, added, shared)
    rms_norm(hidden, layer.post_norm, settings.post_epsilon, normed)
    gate_and_up, activated = np.empty((count, 2 * inner), np.uint16), np.empty((count, inner), np.uint16)
    linear(normed, layer.gate_up, layer.gate_up_bias, gate_and_up, threads)
    silu_and_mul(gate_and_up, activated)
    linear(activated, layer.down, layer.down_bias, added, threads)
    _add_rows(hidden, added, shared)


@kernel()
def decoder_layers(rows, addresses, windows, first, settings, shared):
    """Compute decoder layers of Llama's structure in place, for rows that all attend one by one.

    rows: DecodeRows. addresses (layers, 12) uint64: of each array in LayerArrays, for each layer. windows (layers,)
    int64: tokens that a layer sees, 0 for all. first: LayerArrays of the first layer, whose shapes and types are those
    of all. settings: LayerSettings. shared: SharedBlocks, of one rank if the model is not split.

    The layers come as addresses, because numba would unbox hundreds of arrays in every call.
    """
    for layer in range(len(addresses)):
        place = addresses[layer]
        arrays = LayerArrays(
            array_at(place[0], first.keys),
            array_at(place[1], first.values),
            array_at(place[2], first.norm),
            array_at(place[3], first.qkv),
            array_at(place[4], first.qkv_bias),
            array_at(place[5], first.o),
            array_at(place[6], first.o_bias),
            array_at(place[7], first.post_norm),
            array_at(place[8], first.gate_up),
            array_at(place[9], first.gate_up_bias),
            array_at(place[10], first.down),
            array_at(place[11], first.down_bias),
        )
        _decoder_layer(rows, arrays, windows[layer], settings, shared)
