"""Attention over the slots of the KV cache, as one pass over keys and values, parallel over rows and heads."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload
from numba.np.numpy_support import from_dtype

from handlers.cpu_kernels.attention.packed_rows import is_packed, unpack, write_row
from handlers.cpu_kernels.attention.products import (
    HAS_MANY_REGISTERS,
    MAX_HEADS,
    WIDE_COLUMNS,
    add_weighted,
    add_weighted_wide,
    add_weighted_wide_of_2,
    add_weighted_wide_of_3,
    dot,
    dots,
    prefetch,
)
from handlers.cpu_kernels.compilation.decorators import PART, kernel, kernel_part
from handlers.cpu_kernels.inlined import exp, first_seen, sink_weight
from handlers.cpu_kernels.intrinsics import LANES, empty, larger, load, store
from handlers.cpu_kernels.threads.parallel import in_threads, shares_of

# All heads of a group add the values of so many tokens before others are read: they are in the L1 cache meanwhile.
_NEAR_TOKENS = 64


@functools.cache
def write_rows(dtype: np.dtype[Any], kept: np.dtype[Any]) -> Callable[..., None]:
    """Return the kernel that writes each row's key and value into its slot, for types of elements: `kept` of slots.

    Its arrays are as for `slot_attention`. It is compiled now for rows of any strides, for the reason that
    `chunk_attention` gives.
    """
    shapes = (from_dtype(dtype), 3, "A"), (from_dtype(kept), 4, "C"), (types.int64, 1, "C")
    rows, cache, places = (types.Array(*shape) for shape in shapes)
    return kernel(types.void(rows, rows, cache, cache, places, places))(_write_rows)


def _write_rows(key, value, keys, values, slots, positions):
    in_threads(_write_some, len(slots), (key, value, keys, values, slots, positions))


@kernel_part()
def _write_some(first, last, key, value, keys, values, slots, positions):
    for row in range(first, last):
        for kv_head in range(key.shape[0]):
            write_row(keys[slots[row], kv_head, positions[row]], key[kv_head, row])
            write_row(values[slots[row], kv_head, positions[row]], value[kv_head, row])


@kernel()
def slot_attention(query, key, value, keys, values, slots, positions, out, settings):
    """Write each row's key and value into its slot; then each row attends to its slot up to its own position.

    query (heads, rows, dim), key and value (kv_heads, rows, dim): any strides; the first `len(slots)` rows
    are read. keys, values: (slots, kv_heads, max_len, dim), contiguous, or packed rows. slots, positions: (n,) int64,
    several rows may be of one slot. out: (rows, heads, value_dim), contiguous. settings: AttentionSettings.

    All heads that share keys and values (a group) are one piece of work, so that these are read from memory once.
    """
    in_threads(_write_some, len(slots), (key, value, keys, values, slots, positions))
    shares = shares_of(settings.threads)
    in_threads(_attend_rows, shares, (query, keys, values, slots, positions, out, settings, shares))


@kernel_part(fastmath=True)
def _attend_rows(first_share, last_share, query, keys, values, slots, positions, out, settings, shares):
    softcap, window, chunk, sinks = np.float32(settings.softcap), settings.window, settings.chunk, settings.sinks
    kv_heads, value_dim = keys.shape[1], out.shape[2]
    group = query.shape[0] // kv_heads
    pieces = len(slots) * kv_heads
    longest = np.int64(0)
    for row in range(len(slots)):
        longest = max(longest, positions[row] + 1)
    if window > 0:
        longest = min(longest, window)
    if chunk > 0:
        longest = min(longest, chunk)
    own = empty((group, query.shape[2]), query.dtype)
    scores, mixed = empty((group, longest), np.float32), empty((group, value_dim), np.float32)
    room = empty((_NEAR_TOKENS, query.shape[2]), query.dtype), empty((_NEAR_TOKENS, value_dim), query.dtype)
    scales = empty(_NEAR_TOKENS, np.float32)
    for share in range(first_share, last_share):
        # Neighbouring pieces, the rows of one sequence say, cost about the same: shares take turns with them.
        for piece in range(share, pieces, shares):
            row, kv_head = piece // kv_heads, piece % kv_heads
            slot, last = slots[row], positions[row]
            begin = first_seen(last, window, chunk)
            count = last + 1 - begin
            seen_keys, seen_values = keys[slot, kv_head, begin:], values[slot, kv_head, begin:]
            # Memory delivers all the time: values while scores are computed, and then the next piece's keys.
            following = min(piece + shares, pieces - 1)
            next_slot, next_last = slots[following // kv_heads], positions[following // kv_heads]
            next_begin = first_seen(next_last, window, chunk)
            next_keys, next_count = keys[next_slot, following % kv_heads, next_begin:], next_last + 1 - next_begin
            for g in range(group):
                for d in range(query.shape[2]):
                    own[g, d] = query[kv_head * group + g, row, d]
            score_slot(own, seen_keys, count, np.float32(settings.scaling), scores, seen_values, room[0], scales)
            for g in range(group):
                weights = scores[g, :count]
                if softcap > 0:
                    for t in range(count):
                        weights[t] = softcap * math.tanh(weights[t] / softcap)
                _softmax(weights, sinks, kv_head * group + g)
                for d in range(value_dim):
                    mixed[g, d] = 0
            for first in range(0, count, _NEAR_TOKENS):
                end = min(first + _NEAR_TOKENS, count)
                for t in range(first, min(end, next_count)):
                    prefetch(next_keys, t)
                add_slot(scores, seen_values, first, end, mixed, room[1], scales)
            for g in range(group):
                for d in range(value_dim):
                    out[row, kv_head * group + g, d] = store(mixed[g, d], out[row, 0, 0])


def score_slot(own, keys, count, scaling, scores, values, room, scales):
    """Do what `_score_tokens` does, also for packed keys: their numbers come into `room`, (n, dim), n at a time."""


@overload(score_slot, jit_options=PART)
def _score_slot(own, keys, count, scaling, scores, values, room, scales):
    if not is_packed(keys):
        return lambda own, keys, count, scaling, scores, values, room, scales: _score_tokens(
            own, keys, count, scaling, scores, values
        )

    def unpacked(own, keys, count, scaling, scores, values, room, scales):
        for first in range(0, count, len(room)):
            end = min(first + len(room), count)
            unpack(keys, first, end, room, scales)
            scored = scores[:, first:end]
            _score_tokens(own, room, end - first, scaling, scored, values[first:])
            for g in range(len(own)):
                for t in range(end - first):
                    scored[g, t] *= scales[t]

    return unpacked


def add_slot(weights, values, first, end, sums, room, scales):
    """Do what `_add_values` does, also for packed values: their numbers come into `room`, (end - first, dim)."""


@overload(add_slot, jit_options=PART)
def _add_slot(weights, values, first, end, sums, room, scales):
    if not is_packed(values):
        return lambda weights, values, first, end, sums, room, scales: _add_values(weights, values, first, end, sums)

    def unpacked(weights, values, first, end, sums, room, scales):
        unpack(values, first, end, room, scales)
        weighed = weights[:, first:end]
        for g in range(len(sums)):
            for t in range(end - first):
                weighed[g, t] *= scales[t]
        _add_values(weighed, room, 0, end - first, sums)

    return unpacked


@kernel_part(is_separate=True, fastmath=True)
def _score_tokens(own, keys, count, scaling, scores, values):
    """Write the scores of the first `count` tokens for all heads of a group; ask for the values of these tokens."""
    group, dim = own.shape
    of_vector = LANES * 4 // own.itemsize
    vectors = dim // of_vector
    if HAS_MANY_REGISTERS and count >= LANES:
        for first in range(0, count, LANES):
            begin = min(first, count - LANES)  # the last ones overlap with those before
            for t in range(first, min(first + LANES, count)):
                prefetch(values, t)
            for g in range(group):
                dots(own, g, keys, begin, vectors, scaling, scores, begin)
                for d in range(vectors * of_vector, dim):
                    for t in range(begin, begin + LANES):
                        scores[g, t] += load(own[g, d]) * load(keys[t, d]) * scaling
        return
    for t in range(count):
        prefetch(values, t)
        for g in range(group):
            score = dot(own, g, keys, t, vectors)
            for d in range(vectors * of_vector, dim):
                score += load(own[g, d]) * load(keys[t, d])
            scores[g, t] = score * scaling


@kernel_part(fastmath=True)
def _softmax(scores, sinks, head):
    """Turn the scores of one head into weights, in place. `sinks` as in AttentionSettings."""
    highest = np.float32(-np.inf)
    for t in range(len(scores)):
        highest = larger(highest, scores[t])
    total = np.float32(0)
    for t in range(len(scores)):
        weight = exp(scores[t] - highest)
        scores[t] = weight
        total += weight
    total += sink_weight(sinks, head, highest)
    for t in range(len(scores)):
        scores[t] /= total


@kernel_part(is_separate=True, fastmath=True)
def _add_values(weights, values, first, end, sums):
    """Add the weighted values of tokens `first:end` to the sums of all heads of a group."""
    group, dim = sums.shape
    wide, narrow = dim // WIDE_COLUMNS * WIDE_COLUMNS, dim // LANES * LANES
    for g in range(0, group, MAX_HEADS):
        heads = min(MAX_HEADS, group - g)
        for d in range(0, wide, WIDE_COLUMNS):
            if heads == 3:
                add_weighted_wide_of_3(weights, g, values, first, end, sums, d)
            elif heads == 2:
                add_weighted_wide_of_2(weights, g, values, first, end, sums, d)
            else:
                add_weighted_wide(weights, g, values, first, end, sums, d)
    for g in range(group):
        for d in range(wide, narrow, LANES):
            add_weighted(weights, g, values, first, end, sums, d)
        for d in range(narrow, dim):
            for t in range(first, end):
                sums[g, d] += weights[g, t] * load(values[t, d])
