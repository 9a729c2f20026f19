"""Attention of prompt chunks over the slots of the KV cache, by products of tiles."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.np.numpy_support import from_dtype

from handlers.cpu_kernels import amx
from handlers.cpu_kernels.arguments import AttentionSettings, SeenColumns, SlotSpan
from handlers.cpu_kernels.attention.chunks_amx import chunk_attention_in_tile_registers
from handlers.cpu_kernels.attention.packed_rows import rows_of
from handlers.cpu_kernels.compilation.decorators import kernel, kernel_part
from handlers.cpu_kernels.inlined import exp, fill, seen_columns, sink_weight
from handlers.cpu_kernels.intrinsics import (
    TILE_COLUMNS,
    TILE_ROWS,
    add_product,
    empty,
    finite,
    larger,
    store,
    word,
    words_of,
    zeros,
)
from handlers.cpu_kernels.threads.parallel import in_threads, shares_of


@functools.cache
def chunk_attention(dtype: np.dtype[Any], kept: np.dtype[Any]) -> Callable[..., None]:
    """Return the kernel for elements of a type, np.uint16 (bfloat16) or np.float32; those of slots are of type `kept`.

    numba compiles a function anew for each combination of argument types, and the layout of an array is part of its
    type. A query with strides that did not occur before would cost seconds in the middle of a request; so the kernel
    is compiled now, for queries of any strides.
    """
    element = from_dtype(dtype)
    query, cache, out = (
        types.Array(element, 3, "A"),
        types.Array(from_dtype(kept), 4, "C"),
        types.Array(element, 3, "C"),
    )
    no_rows = np.empty(0, np.int64)
    settings_like = AttentionSettings(1.0, 0, 0, 0.0, 1, np.empty(0, np.float32))
    groups = (SlotSpan(0, 0, 0), SeenColumns(0, 0, no_rows, no_rows), settings_like)
    span, columns, settings = map(numba.typeof, groups)
    signature = types.void(query, cache, cache, span, columns, out, settings)
    in_tile_registers = amx.IS_USABLE and dtype == np.uint16
    return kernel(signature)(chunk_attention_in_tile_registers if in_tile_registers else _chunk_attention)


def _chunk_attention(query, keys, values, span, columns, out, settings):
    """Compute attention for the rows of a chunk, each to the tokens that it may see.

    query (heads, rows, dim), any strides; keys (slots, kv_heads, max_len, dim) and values (slots, kv_heads, max_len,
    value_dim), or packed rows; the SlotSpan `span` holds the columns -> out (rows, heads, value_dim).
    columns: SeenColumns. settings: AttentionSettings.

    The rows of this kernel are the query heads that share keys and values: those of a token, then those of the next
    token. TILE_ROWS of them are a tile. Tiles are independent, so threads share them; each tile is taken from scores
    over softmax to the weighted sum of values at once, while its scores (all columns) are in the processor's cache.
    Only products of tiles are worth computing, so a tile also computes scores that some of its rows may not see; the
    softmax leaves these at weight zero. Tiles of columns that no row sees are skipped.
    """
    farthest = columns.last_own[0]
    for last in columns.last_own:
        farthest = max(farthest, last)
    laid_keys, laid_values = _laid_out((keys, values, span.slot, span.first, farthest), query, out)
    shares = shares_of(settings.threads)
    in_threads(_attend_tiles, shares, (query, laid_keys, laid_values, farthest, columns, out, settings, shares))


@kernel_part(fastmath=True)
def _attend_tiles(first_share, last_share, query, laid_keys, laid_values, seen, columns, out, settings, shares):
    start, begin, first_own, last_own = columns.start, columns.begin, columns.first_own, columns.last_own
    scaling, softcap = np.float32(settings.scaling), np.float32(settings.softcap)
    window, chunk, sinks = settings.window, settings.chunk, settings.sinks
    dim, value_dim, kv_heads, of_word = query.shape[2], out.shape[2], len(laid_keys), 4 // query.itemsize
    group, like = query.shape[0] // kv_heads, query[0, 0, 0]
    tiles, key_words, value_words = laid_keys.shape[1], laid_keys.shape[2], laid_values.shape[1]
    rows, shared = len(first_own) * group, start - begin
    units, shared_words = -(-rows // TILE_ROWS), -(-shared // of_word)
    queries = zeros((TILE_ROWS, key_words * of_word), query.dtype)
    scores = empty((TILE_ROWS, tiles * TILE_COLUMNS), np.float32)
    weights = empty((TILE_ROWS, value_words * of_word), query.dtype)
    mixed = empty((TILE_ROWS, laid_values.shape[2]), np.float32)
    for share in range(first_share, last_share):
        for piece in range(share, kv_heads * units, shares):
            head, first = piece // units, piece % units * TILE_ROWS
            lowest, nearest, farthest = seen, seen, 0
            for r in range(TILE_ROWS):  # the last tile may hold a row several times
                row = min(first + r, rows - 1)
                for d in range(dim):
                    queries[r, d] = query[head * group + row % group, row // group, d]
                low, own, last = seen_columns(first_own, last_own, row // group, start, begin, window, chunk)
                lowest, nearest, farthest = min(lowest, low), min(nearest, own), max(farthest, last)
            fill(scores, np.float32(0))
            for tile in range(lowest // TILE_COLUMNS, -(-farthest // TILE_COLUMNS)):
                column = tile * TILE_COLUMNS
                if column < shared or column + TILE_COLUMNS > nearest:  # else only columns of other sequences
                    add_product(words_of(queries), 0, key_words, laid_keys[head, tile], scores, column, like)
            fill(weights, store(np.float32(0), like))
            for r in range(TILE_ROWS):
                row = min(first + r, rows - 1)
                low, own, last = seen_columns(first_own, last_own, row // group, start, begin, window, chunk)
                query_head = head * group + row % group
                _softmax(scores[r], weights[r], low, shared, own, last, scaling, softcap, sinks, query_head)
            fill(mixed, np.float32(0))
            low_word, own_word = lowest // of_word, max(shared_words, nearest // of_word)
            for column in range(0, value_dim, TILE_COLUMNS):
                for begins, ends in ((low_word, shared_words), (own_word, -(-farthest // of_word))):
                    area = laid_values[head, begins:, column : column + TILE_COLUMNS]
                    add_product(words_of(weights), begins, ends - begins, area, mixed, column, like)
            for r in range(min(TILE_ROWS, rows - first)):
                row = first + r
                for d in range(value_dim):
                    out[row // group, head * group + row % group, d] = store(mixed[r, d], like)


@kernel_part(fastmath=True)
def _softmax(score, weight, low, shared, own, last, scaling, softcap, sinks, head):
    """Write the softmax over columns `low:shared` and `own:last` of `score` to `weight`; `score` is overwritten.

    `sinks` as in AttentionSettings; the row is one of query head `head`.
    """
    highest, total, factor = np.float32(-np.inf), np.float32(0), scaling
    # Both parts are slices because LLVM turns loops over them into vector instructions: with offsets that numba would
    # have to check for negative values (which wrap around), it does not.
    for part in range(2):
        scored = score[low:shared] if part == 0 else score[own:last]
        if softcap > 0:
            for t in range(len(scored)):
                scored[t] = softcap * math.tanh(scored[t] * scaling / softcap)
            factor = np.float32(1)
        for t in range(len(scored)):
            highest = larger(highest, scored[t])
    for part in range(2):
        scored = score[low:shared] if part == 0 else score[own:last]
        for t in range(len(scored)):
            scored[t] = exp((scored[t] - highest) * factor)
            total += scored[t]
    share = np.float32(1) / (total + sink_weight(sinks, head, highest * factor))
    for part in range(2):
        scored = score[low:shared] if part == 0 else score[own:last]
        weighed = weight[low:shared] if part == 0 else weight[own:last]
        for t in range(len(scored)):
            weighed[t] = store(scored[t] * share, weight[0])


@kernel_part()
def _laid_out(cached, query, out):
    """Return keys and values of a slot in the layout that `add_product` reads, as elements of query and out.

    cached: keys (slots, kv_heads, max_len, dim), values (slots, kv_heads, max_len, value_dim), contiguous, or packed
    rows; slot; offset; columns: how many are laid out from the offset on. Keys are transposed by tiles of
    columns: (kv_heads, tiles, words of a key, TILE_COLUMNS). Each word of the values holds the elements of neighbouring
    columns: (kv_heads, words of all columns, value_dim rounded up to TILE_COLUMNS). Zeros replace values that are not
    finite: rows of other sequences in a tile multiply them by zero, which would make their sums NaN.
    """
    kv_heads, columns = cached[0].shape[1], cached[4]
    dim, value_dim, of_word = query.shape[2], out.shape[2], 4 // query.itemsize
    tiles, value_words = -(-columns // TILE_COLUMNS), -(-columns // of_word)
    laid_keys = empty((kv_heads, tiles, -(-dim // of_word), TILE_COLUMNS), np.uint32)
    laid_values = empty((kv_heads, value_words, -(-value_dim // TILE_COLUMNS) * TILE_COLUMNS), np.uint32)
    in_threads(_lay_out, kv_heads * tiles, (cached, query, out, laid_keys, laid_values))
    return laid_keys, laid_values


@kernel_part()
def _lay_out(first_work, last_work, cached, query, out, laid_keys, laid_values):
    keys, values, slot, offset, columns = cached
    tiles, dim, value_dim, of_word = laid_keys.shape[1], query.shape[2], out.shape[2], 4 // query.itemsize
    zero = query.dtype.type(0)
    room = empty((TILE_COLUMNS, dim), query.dtype), empty((TILE_COLUMNS, value_dim), query.dtype)
    for work in range(first_work, last_work):
        head, tile = work // tiles, work % tiles
        first, last = tile * TILE_COLUMNS, min((tile + 1) * TILE_COLUMNS, columns)
        laid, key = laid_keys[head, tile], rows_of(keys, slot, head, offset + first, offset + last, room[0])
        for place in range(dim // of_word):
            for column in range(len(key)):
                laid[place, column] = word(key[column, place * of_word], key[column, (place + 1) * of_word - 1])
        if dim % of_word:
            for column in range(len(key)):
                laid[dim // of_word, column] = word(key[column, dim - 1], zero)
        value = rows_of(values, slot, head, offset + first, offset + last, room[1])
        for place in range(-(-len(value) // of_word)):
            one, other = value[place * of_word], value[min((place + 1) * of_word, len(value)) - 1]
            target = laid_values[head, first // of_word + place]
            for d in range(value_dim):
                target[d] = word(finite(one[d]), finite(other[d]))
