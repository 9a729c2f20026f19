"""All decoder layers of a model of Llama's structure in one call."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import numpy as np

from handlers.cpu_kernels.arguments import AttentionSettings, LayerArrays
from handlers.cpu_kernels.attention.decoding import slot_attention
from handlers.cpu_kernels.blocks.linear import block_linear
from handlers.cpu_kernels.compilation.decorators import kernel, kernel_part
from handlers.cpu_kernels.int8.linear import block_linear_int8
from handlers.cpu_kernels.intrinsics import array_at, empty, heads_of, reshaped
from handlers.cpu_kernels.linear import linear
from handlers.cpu_kernels.rows import add_and_norm, rms_norm, rotate, silu_and_mul
from handlers.cpu_kernels.threads.shared_memory import all_reduce


@kernel_part()
def _summed(added, shared):
    """Sum what the ranks have computed, in place, if the model is split."""
    if len(shared.blocks) > 1:
        every = reshaped(added, (added.size,))
        all_reduce(every, every, shared)


@kernel_part()
def _multiply(rows, weight, bias, out, threads):
    """Compute a linear layer of bfloat16, or of few bits: numba compiles one branch, by the weight's dimensions."""
    if weight.ndim == 1:
        block_linear(rows, weight, bias, out, threads)
    elif weight.ndim == 2:
        block_linear_int8(rows, weight, bias, out, threads)
    else:
        linear(rows, weight, bias, out, threads)


@kernel_part(inline="always")  # as a kernel of its own LLVM would compile it, with all kernels that it calls, twice
def _decoder_layer(rows, space, layer, window, next_norm, next_epsilon, settings, shared):
    """Compute one layer, for LayerArrays of it and the `window` that it sees.

    `space.normed` has its normed input, and then that of what follows, which `next_norm` is the weight of.
    """
    hidden, threads = rows.hidden, settings.threads
    kv_heads, heads, dim = layer.keys.shape[1], space.attended.shape[1], space.attended.shape[2]
    _multiply(space.normed, layer.qkv, layer.qkv_bias, space.projected, threads)
    rotate(space.projected, rows.cosines, rows.sines, heads + kv_heads)
    by_head = heads_of(space.projected, dim)
    query, key, value = by_head[:heads], by_head[heads : heads + kv_heads], by_head[heads + kv_heads :]
    no_sinks = empty(0, np.float32)
    attention = AttentionSettings(settings.scaling, window, 0, settings.softcap, threads, no_sinks)
    slot_attention(query, key, value, layer.keys, layer.values, rows.slots, rows.positions, space.attended, attention)
    attended = reshaped(space.attended, (len(hidden), heads * dim))
    _multiply(attended, layer.o, layer.o_bias, space.added, threads)
    _summed(space.added, shared)
    add_and_norm(hidden, space.added, layer.post_norm, settings.post_epsilon, space.normed)
    _multiply(space.normed, layer.gate_up, layer.gate_up_bias, space.gate_up, threads)
    silu_and_mul(space.gate_up, space.activated)
    _multiply(space.activated, layer.down, layer.down_bias, space.added, threads)
    _summed(space.added, shared)
    add_and_norm(hidden, space.added, next_norm, next_epsilon, space.normed)


@kernel()
def decoder_layers(rows, space, addresses, windows, first, last_norm, settings, shared):
    """Compute decoder layers of Llama's structure, and the norm behind them, for rows that all attend one by one.

    rows: DecodeRows. space: Activations of as many rows; `normed` has the result. addresses (layers, 12) uint64: of
    each array in LayerArrays, for each layer. windows (layers,) int64: tokens that a layer sees, 0 for all. first:
    LayerArrays of the first layer, whose shapes and types are those of all. last_norm (width,): the weight of the norm.
    settings: LayerSettings. shared: SharedBlocks, of one rank if the model is not split.

    The layers come as addresses, because numba would unbox hundreds of arrays in every call.
    """
    rms_norm(rows.hidden, first.norm, settings.epsilon, space.normed)
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
        next_norm, next_epsilon = last_norm, settings.last_epsilon
        if layer + 1 < len(addresses):
            next_norm, next_epsilon = array_at(addresses[layer + 1, 2], last_norm), settings.epsilon
        _decoder_layer(rows, space, arrays, windows[layer], next_norm, next_epsilon, settings, shared)
