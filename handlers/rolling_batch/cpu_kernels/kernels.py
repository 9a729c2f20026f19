"""CPU kernels of a step, compiled by numba when the model loads.

torch's own attention pays per call for one query token per sequence and multiplies bfloat16 to bfloat16 only, and its
bfloat16 element-wise operations run one by one over memory; here each is one pass over it, parallel over rows.
bfloat16 tensors come in as uint16 arrays (numpy has no bfloat16); sums of them are float32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import njit, prange, types
from numba.np.numpy_support import from_dtype

from handlers.rolling_batch.cpu_kernels.arguments import (
    CACHE_LINE,
    AttentionSettings,
    LayerArrays,
    SeenColumns,
    SlotSpan,
)
from handlers.rolling_batch.cpu_kernels.compilation import kernel
from handlers.rolling_batch.cpu_kernels.intrinsics import (
    TILE_COLUMNS,
    TILE_ROWS,
    add_product,
    array_at,
    larger,
    load,
    load_acquire,
    power_of_two,
    store,
    store_release,
    word,
)

_MOST_WORDS = 512  # of a tile's rows and columns, between which a product goes on to the next rows: they stay in L2
_MOST_TILES = 64  # of rows, whose sums are kept for that

_yield_core = types.ExternalFunction("sched_yield", types.int32())


@njit(fastmath=True, inline="always")
def _exp(x):
    """e ** x in float32 to about one unit in the last place, without a call, so that loops of it become vectors."""
    t = min(max(x, np.float32(-87.0)), np.float32(88.0)) * np.float32(1.4426950408889634)
    whole = np.floor(t + np.float32(0.5))
    f = t - whole
    p = np.float32(1.5403530393381609e-4)
    p = p * f + np.float32(1.3333558146428443e-3)
    p = p * f + np.float32(9.6181291076284772e-3)
    p = p * f + np.float32(5.5504108664821580e-2)
    p = p * f + np.float32(2.4022650695910072e-1)
    p = p * f + np.float32(6.9314718055994531e-1)
    p = p * f + np.float32(1.0)
    return p * power_of_two(np.int32(whole))


@njit(inline="always")
def _dealt(work, count, threads):
    """Which of `count` pieces of work to do as number `work`; `count` or more for none.

    Numbers go up to `-(-count // threads) * threads`, and a thread takes a run of them. The pieces are dealt to the
    threads in turns, because neighbours cost about the same.
    """
    share = -(-count // threads)
    return work % share * threads + work // share


def _of_rows(element):
    """Signature of `write_rows` for rows of any strides."""
    rows, cache, places = (
        types.Array(*shape) for shape in ((element, 3, "A"), (element, 4, "C"), (types.int64, 1, "C"))
    )
    return types.void(rows, rows, cache, cache, places, places)


@kernel([_of_rows(types.uint16), _of_rows(types.float32)], parallel=True)
def write_rows(key, value, keys, values, slots, positions):
    """Write each row's key and value into its slot; arrays as for `slot_attention`.

    It is compiled for rows of any strides, as `chunk_attention` is for queries.
    """
    for row in prange(len(slots)):
        for kv_head in range(key.shape[0]):
            slot_key = keys[slots[row], kv_head, positions[row]]
            slot_value = values[slots[row], kv_head, positions[row]]
            for d in range(key.shape[2]):
                slot_key[d] = key[kv_head, row, d]
            for d in range(value.shape[2]):
                slot_value[d] = value[kv_head, row, d]


@kernel(parallel=True, fastmath=True)
def slot_attention(query, key, value, keys, values, slots, positions, out, settings):
    """Write each row's key and value into its slot, then let it attend to the slot's tokens up to its own position.

    query (heads, rows, dim), key and value (kv_heads, rows, dim): any strides, of which the first `len(slots)` rows
    are read. keys, values: (slots, kv_heads, max_len, dim), contiguous. slots, positions: (n,) int64, several rows may
    be of one slot. out: (rows, heads, value_dim), contiguous. settings: AttentionSettings.
    """
    scaling, softcap = np.float32(settings.scaling), np.float32(settings.softcap)
    window, threads = settings.window, settings.threads
    dim, value_dim, kv_heads = query.shape[2], value.shape[2], key.shape[0]
    group = query.shape[0] // kv_heads
    write_rows(key, value, keys, values, slots, positions)
    pieces = len(slots) * kv_heads
    for work in prange(-(-pieces // threads) * threads):
        piece = _dealt(work, pieces, threads)
        if piece >= pieces:
            continue
        row, kv_head = piece // kv_heads, piece % kv_heads
        slot, last = slots[row], positions[row]
        slot_keys, slot_values = keys[slot, kv_head], values[slot, kv_head]
        begin = max(0, last + 1 - window) if window > 0 else 0
        count = last + 1 - begin
        scaled = np.empty((group, dim), np.float32)
        scores = np.empty((group, count), np.float32)
        mixed = np.zeros((group, value_dim), np.float32)
        for g in range(group):
            for d in range(dim):
                scaled[g, d] = load(query[kv_head * group + g, row, d]) * scaling
        for t in range(count):
            for g in range(group):
                score = np.float32(0)
                for d in range(dim):
                    score += scaled[g, d] * load(slot_keys[begin + t, d])
                scores[g, t] = score
        for g in range(group):
            if softcap > 0:
                for t in range(count):
                    scores[g, t] = softcap * math.tanh(scores[g, t] / softcap)
            highest = np.float32(-np.inf)
            for t in range(count):
                highest = larger(highest, scores[g, t])
            total = np.float32(0)
            for t in range(count):
                weight = _exp(scores[g, t] - highest)
                scores[g, t] = weight
                total += weight
            for t in range(count):
                scores[g, t] /= total
        for t in range(count):
            for g in range(group):
                weight = scores[g, t]
                for d in range(value_dim):
                    mixed[g, d] += weight * load(slot_values[begin + t, d])
        for g in range(group):
            for d in range(value_dim):
                out[row, kv_head * group + g, d] = store(mixed[g, d], out[row, 0, 0])


@njit(inline="always")
def _seen(first_own, last_own, row, start, begin, window):
    """Columns that a row of a chunk may see: from the first number on of those of all rows, from the second of its own.

    The third is the first column behind its own.
    """
    own, last, shared = first_own[row], last_own[row], start - begin
    seen = start + last - own  # tokens up to the row's own
    if window <= 0:
        return 0, own, last
    return min(max(0, seen - window - begin), shared), own + max(0, seen - window - start), last


@njit(fastmath=True, inline="always")
def _softmax(score, weight, low, shared, own, last, scaling, softcap):
    """Softmax over columns `low` to `shared` - 1 and `own` to `last` - 1 of `score`, overwritten -> `weight`."""
    highest, total, factor = np.float32(-np.inf), np.float32(0), scaling
    for part in range(2):  # slices, because loops over them become vectors: their indices are never negative
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
            scored[t] = _exp((scored[t] - highest) * factor)
            total += scored[t]
    share = np.float32(1) / total
    for part in range(2):
        scored = score[low:shared] if part == 0 else score[own:last]
        weighed = weight[low:shared] if part == 0 else weight[own:last]
        for t in range(len(scored)):
            weighed[t] = store(scored[t] * share, weight[0])


@kernel(parallel=True)
def _laid_out(keys, values, slot, offset, columns):
    """Lay out keys and values of a slot, `columns` of them from `offset` on, for `add_product`.

    keys (slots, kv_heads, max_len, dim), values (slots, kv_heads, max_len, value_dim): contiguous. The laid keys come
    by tiles of columns: (kv_heads, tiles, words of a key, TILE_COLUMNS). A word of the laid values holds what
    neighbouring columns have there: (kv_heads, words of all columns, value_dim or a little more).
    """
    kv_heads, dim, value_dim, of_word = keys.shape[1], keys.shape[3], values.shape[3], 4 // keys.itemsize
    tiles, value_words = -(-columns // TILE_COLUMNS), -(-columns // of_word)
    laid_keys = np.empty((kv_heads, tiles, -(-dim // of_word), TILE_COLUMNS), np.uint32)
    laid_values = np.empty((kv_heads, value_words, -(-value_dim // TILE_COLUMNS) * TILE_COLUMNS), np.uint32)
    for work in prange(kv_heads * tiles):
        head, tile = work // tiles, work % tiles
        first, last = tile * TILE_COLUMNS, min((tile + 1) * TILE_COLUMNS, columns)
        laid, key = laid_keys[head, tile], keys[slot, head, offset + first : offset + last]
        for place in range(dim // of_word):
            for column in range(len(key)):
                laid[place, column] = word(key[column, place * of_word], key[column, (place + 1) * of_word - 1])
        if dim % of_word:
            for column in range(len(key)):
                laid[dim // of_word, column] = word(key[column, dim - 1], store(np.float32(0), key[0, 0]))
        for place in range(first // of_word, -(-last // of_word)):
            column = offset + place * of_word
            value, neighbour = (
                values[slot, head, column],
                values[slot, head, min(column + of_word, offset + columns) - 1],
            )
            for d in range(value_dim):
                laid_values[head, place, d] = word(value[d], neighbour[d])
    return laid_keys, laid_values


@functools.cache
def chunk_attention(dtype: np.dtype[Any]) -> Callable[..., None]:
    """Return the kernel for elements of a type, np.uint16 (bfloat16) or np.float32.

    It is compiled for queries of any strides: otherwise numba would compile it once more for those of a kind that it
    has not met, for seconds in the middle of a request.
    """
    element = from_dtype(dtype)
    query, cache, out = (types.Array(element, *shape) for shape in ((3, "A"), (4, "C"), (3, "C")))
    no_rows = np.empty(0, np.int64)
    groups = (SlotSpan(0, 0, 0), SeenColumns(0, 0, no_rows, no_rows), AttentionSettings(1.0, 0, 0.0, 1))
    span, columns, settings = map(numba.typeof, groups)
    signature = types.void(query, cache, cache, span, columns, out, settings)
    return kernel(signature, parallel=True, fastmath=True)(_chunk_attention)


def _chunk_attention(query, keys, values, span, columns, out, settings):
    """Let each row of a chunk attend to the tokens that it may see.

    query (heads, rows, dim), any strides; keys (slots, kv_heads, max_len, dim) and values (slots, kv_heads, max_len,
    value_dim), of which the SlotSpan `span` holds the columns -> out (rows, heads, value_dim). columns: SeenColumns.
    settings: AttentionSettings.

    A tile of rows, which are a token's heads of the same keys and then the next token's, is taken to its end while its
    scores are in the processor's cache.
    """
    slot, offset = span.slot, span.first
    start, begin, first_own, last_own = columns.start, columns.begin, columns.first_own, columns.last_own
    scaling, softcap = np.float32(settings.scaling), np.float32(settings.softcap)
    window, threads = settings.window, settings.threads
    kv_heads, dim, value_dim, seen = keys.shape[1], keys.shape[3], values.shape[3], last_own.max()
    group, like = query.shape[0] // kv_heads, query[0, 0, 0]
    laid_keys, laid_values = _laid_out(keys, values, slot, offset, seen)
    tiles, key_words, value_words = laid_keys.shape[1], laid_keys.shape[2], laid_values.shape[1]
    rows, shared, of_word = len(first_own) * group, start - begin, 4 // keys.itemsize
    units, shared_words = -(-rows // TILE_ROWS), -(-shared // of_word)
    pieces = kv_heads * units
    for work in prange(-(-pieces // threads) * threads):
        piece = _dealt(work, pieces, threads)
        if piece >= pieces:
            continue
        head, first = piece // units, piece % units * TILE_ROWS
        queries = np.zeros((TILE_ROWS, key_words * of_word), query.dtype)
        lowest, nearest, farthest = seen, seen, 0
        for r in range(TILE_ROWS):  # the last tile may hold a row several times
            row = min(first + r, rows - 1)
            for d in range(dim):
                queries[r, d] = query[head * group + row % group, row // group, d]
            low, own, last = _seen(first_own, last_own, row // group, start, begin, window)
            lowest, nearest, farthest = min(lowest, low), min(nearest, own), max(farthest, last)
        scores = np.zeros((TILE_ROWS, tiles * TILE_COLUMNS), np.float32)
        for tile in range(lowest // TILE_COLUMNS, -(-farthest // TILE_COLUMNS)):
            column = tile * TILE_COLUMNS
            if column < shared or column + TILE_COLUMNS > nearest:  # else other sequences' own
                add_product(queries.view(np.uint32), 0, key_words, laid_keys[head, tile], scores, column, like)
        weights = np.zeros((TILE_ROWS, value_words * of_word), query.dtype)
        for r in range(TILE_ROWS):
            row = min(first + r, rows - 1)
            low, own, last = _seen(first_own, last_own, row // group, start, begin, window)
            _softmax(scores[r], weights[r], low, shared, own, last, scaling, softcap)
        mixed = np.zeros((TILE_ROWS, laid_values.shape[2]), np.float32)
        low_word, own_word = lowest // of_word, max(shared_words, nearest // of_word)
        for column in range(0, value_dim, TILE_COLUMNS):
            for begins, ends in ((low_word, shared_words), (own_word, -(-farthest // of_word))):
                area = laid_values[head, begins:, column : column + TILE_COLUMNS]
                add_product(weights.view(np.uint32), begins, ends - begins, area, mixed, column, like)
        for r in range(min(TILE_ROWS, rows - first)):
            row = first + r
            for d in range(value_dim):
                out[row // group, head * group + row % group, d] = store(mixed[r, d], like)


@kernel(parallel=True, fastmath=True)
def rms_norm(rows, weight, eps, out):
    """`rows / rms(rows)`, rounded to the element type, times `weight`: (n, width) -> (n, width), as Llama's norm."""
    width = rows.shape[1]
    for n in prange(rows.shape[0]):
        squares = np.float32(0)
        for d in range(width):
            element = load(rows[n, d])
            squares += element * element
        factor = np.float32(1) / np.float32(math.sqrt(squares / width + eps))
        for d in range(width):
            normed = load(store(load(rows[n, d]) * factor, rows[n, d]))
            out[n, d] = store(normed * load(weight[d]), rows[n, d])


@kernel(parallel=True)
def linear(rows, weight, bias, out, threads):
    """`rows @ weight.T + bias` -> out (n, out_features), for elements of bfloat16.

    rows (n, in_features), contiguous; weight (panels, in_features / 2, TILE_COLUMNS) uint32, of which a word holds what
    two inputs weigh in one output; bias (out_features or 0,). Every row's sums are added up in the same order, whatever
    the others are. threads: how many share the work.
    """
    count, width = out.shape
    panels, words, _ = weight.shape
    whole, tiles, like = count // TILE_ROWS, -(-count // TILE_ROWS), rows.dtype.type(0)
    row_words = rows.view(np.uint32)
    rest = np.zeros((TILE_ROWS, words), np.uint32)
    for row in range(whole * TILE_ROWS, count):
        rest[row - whole * TILE_ROWS] = row_words[row]
    for thread in prange(threads):
        sums = np.empty((_MOST_TILES * TILE_ROWS, TILE_COLUMNS), np.float32)
        for panel in range(panels * thread // threads, panels * (thread + 1) // threads):
            column = panel * TILE_COLUMNS
            columns = min(TILE_COLUMNS, width - column)
            for begin in range(0, tiles, _MOST_TILES):
                end = min(begin + _MOST_TILES, tiles)
                sums[: (end - begin) * TILE_ROWS] = 0
                for first in range(0, words, _MOST_WORDS):
                    most, right = min(_MOST_WORDS, words - first), weight[panel, first:]
                    for tile in range(begin, end):
                        left = row_words[tile * TILE_ROWS : (tile + 1) * TILE_ROWS] if tile < whole else rest
                        totals = sums[(tile - begin) * TILE_ROWS : (tile - begin + 1) * TILE_ROWS]
                        add_product(left, first, most, right, totals, 0, like)
                for row in range(begin * TILE_ROWS, min(end * TILE_ROWS, count)):
                    total, target = sums[row - begin * TILE_ROWS], out[row, column : column + columns]
                    if len(bias):
                        added = bias[column : column + columns]
                        for c in range(columns):
                            target[c] = store(total[c] + load(added[c]), like)
                    else:
                        for c in range(columns):
                            target[c] = store(total[c], like)


@kernel(parallel=True, fastmath=True)
def argmax_rows(logits, best):
    """Index of the greatest logit of each row, the first of equals: (n, vocabulary) -> best (n,) int64."""
    width = logits.shape[1]
    block = 1024  # the greatest of a block is found with vector instructions, its place only in the best block
    for n in prange(logits.shape[0]):
        best[n] = 0
        best_block, highest = 0, np.float32(-np.inf)
        for start in range(0, width, block):
            inside = np.float32(-np.inf)
            for v in range(start, min(start + block, width)):
                inside = larger(inside, load(logits[n, v]))
            if inside > highest:
                best_block, highest = start, inside
        for v in range(best_block, min(best_block + block, width)):
            if load(logits[n, v]) == highest:
                best[n] = v
                break


@kernel(parallel=True, fastmath=True)
def log_sum_exp_rows(logits, result):
    """log(sum(exp(row))) of each row: (n, vocabulary) -> result (n,) float32."""
    for n in prange(logits.shape[0]):
        highest = np.float32(-np.inf)
        for v in range(logits.shape[1]):
            highest = larger(highest, load(logits[n, v]))
        total = np.float32(0)
        for v in range(logits.shape[1]):
            total += _exp(load(logits[n, v]) - highest)
        result[n] = highest + math.log(total)


@kernel(parallel=True, fastmath=True)
def silu_and_mul(gate_up, out):
    """`silu(gate) * up` of a fused projection: (n, 2 * width) -> (n, width)."""
    width = out.shape[1]
    for n in prange(out.shape[0]):
        for d in range(width):
            gate = load(gate_up[n, d])
            activated = load(store(gate / (np.float32(1) + _exp(-gate)), gate_up[n, d]))
            out[n, d] = store(activated * load(gate_up[n, width + d]), gate_up[n, d])


@kernel(parallel=True, fastmath=True)
def rotate(rows, cosines, sines, heads):
    """Apply rotary position embeddings in place to the first `heads` heads of each row (Su et al., RoFormer, 2021).

    rows (n, width) of heads beside each other; cosines, sines (n, dim): the halves of a head form its pairs.
    """
    dim = cosines.shape[1]
    half = dim // 2
    for n in prange(rows.shape[0]):
        for head in range(heads):
            first = head * dim
            for d in range(half):
                low, high = load(rows[n, first + d]), load(rows[n, first + half + d])
                turned_low = low * load(cosines[n, d]) - high * load(sines[n, d])
                turned_high = high * load(cosines[n, half + d]) + low * load(sines[n, half + d])
                rows[n, first + d] = store(turned_low, rows[n, first])
                rows[n, first + half + d] = store(turned_high, rows[n, first])


@kernel()
def _publish(shared, count):
    """Let the other ranks read what this rank has written so far: its blocks up to number `count`."""
    store_release(shared.counters + np.uintp(shared.rank * CACHE_LINE), count)


@kernel()
def _wait_for_all(shared, count):
    """Wait until every rank has published its block number `count`."""
    for other in range(len(shared.blocks)):
        looks = 0
        while load_acquire(shared.counters + np.uintp(other * CACHE_LINE)) < count:
            looks += 1
            if looks % 256 == 0:  # let another process have the core: it may be the rank that this one waits for
                _yield_core()


@kernel()
def _published(shared):
    """Return how many blocks this rank has published."""
    return load_acquire(shared.counters + np.uintp(shared.rank * CACHE_LINE))


@kernel(fastmath=True)
def all_reduce(part, out, shared):
    """Sum `part` (n,) of every rank, in the order of the ranks, to `out` (n,). shared: SharedBlocks.

    Block n overwrites block n - 2, which no rank still reads: this rank has waited for block n - 1 of all ranks, and a
    rank publishes that one after it has read every block n - 2. So two blocks a rank suffice, without a barrier.
    """
    blocks, total, count = shared.blocks, shared.scratch, _published(shared)
    ranks, _, block_size = blocks.shape
    for begin in range(0, len(part), block_size):
        size = min(block_size, len(part) - begin)
        place = count & 1
        own = blocks[shared.rank, place]
        for i in range(size):
            own[i] = part[begin + i]
        count += 1
        _publish(shared, count)
        total[:size] = 0
        _wait_for_all(shared, count)
        for other in range(ranks):
            theirs = blocks[other, place]
            for i in range(size):
                total[i] += load(theirs[i])
        for i in range(size):
            out[begin + i] = store(total[i], out[0])


@kernel()
def gather_columns(part, out, shared):
    """Put the columns of every rank, `part` (n, width), beside each other in `out` (n, ranks * width) of rank 0.

    `out` of the other ranks is left as it is. shared: SharedBlocks, used as in `all_reduce`.
    """
    blocks, rank, count = shared.blocks, shared.rank, _published(shared)
    ranks, _, block_size = blocks.shape
    width = part.shape[1]
    most = min(width, block_size)
    rows = max(1, block_size // width)  # of a block, which holds some rows or some columns of one
    for first in range(0, len(part), rows):
        last = min(first + rows, len(part))
        for begin in range(0, width, most):
            end = min(begin + most, width)
            place, size = count & 1, end - begin
            if rank:
                for row in range(first, last):
                    blocks[rank, place, (row - first) * size : (row - first + 1) * size] = part[row, begin:end]
            else:
                out[first:last, begin:end] = part[first:last, begin:end]
            count += 1
            _publish(shared, count)
            _wait_for_all(shared, count)
            if rank == 0:
                for other in range(1, ranks):
                    for row in range(first, last):
                        theirs = blocks[other, place, (row - first) * size : (row - first + 1) * size]
                        out[row, other * width + begin : other * width + end] = theirs


@kernel()
def decoder_layers(rows, addresses, windows, first, settings, shared):
    """Compute decoder layers of Llama's structure in place, for rows that all attend one by one.

    rows: DecodeRows. addresses (layers, 12) uint64: of each array in LayerArrays, for each layer. windows (layers,)
    int64: tokens that a layer sees, 0 for all. first: LayerArrays of the first layer, whose shapes and types are those
    of all. settings: LayerSettings. shared: SharedBlocks, of one rank if the model is not split.
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


@kernel()
def _decoder_layer(rows, layer, window, settings, shared):
    hidden, threads = rows.hidden, settings.threads
    count, width = hidden.shape
    dim, kv_heads, inner = layer.keys.shape[3], layer.keys.shape[1], layer.down.shape[1] * 2
    heads = layer.o.shape[1] * 2 // dim
    normed, added = np.empty((count, width), np.uint16), np.empty((count, width), np.uint16)
    rms_norm(hidden, layer.norm, settings.epsilon, normed)
    projected = np.empty((count, (heads + 2 * kv_heads) * dim), np.uint16)
    linear(normed, layer.qkv, layer.qkv_bias, projected, threads)
    rotate(projected, rows.cosines, rows.sines, heads + kv_heads)
    by_head = projected.reshape((count, heads + 2 * kv_heads, dim)).transpose((1, 0, 2))
    query, key, value = by_head[:heads], by_head[heads : heads + kv_heads], by_head[heads + kv_heads :]
    attended = np.zeros((count, heads, dim), np.uint16)
    attention = AttentionSettings(settings.scaling, window, settings.softcap, threads)
    slot_attention(query, key, value, layer.keys, layer.values, rows.slots, rows.positions, attended, attention)
    linear(attended.reshape((count, heads * dim)), layer.o, layer.o_bias, added, threads)
    _add_rows(hidden, added, shared)
    rms_norm(hidden, layer.post_norm, settings.post_epsilon, normed)
    gate_and_up, activated = np.empty((count, 2 * inner), np.uint16), np.empty((count, inner), np.uint16)
    linear(normed, layer.gate_up, layer.gate_up_bias, gate_and_up, threads)
    silu_and_mul(gate_and_up, activated)
    linear(activated, layer.down, layer.down_bias, added, threads)
    _add_rows(hidden, added, shared)


@kernel(fastmath=True)
def _add_rows(rows, added, shared):
    """Add `added`, or the sum of all ranks' if the model is split, to `rows`: (n, width) uint16 both."""
    if len(shared.blocks) > 1:
        all_reduce(added.reshape(-1), added.reshape(-1), shared)
    for n in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            rows[n, d] = store(load(rows[n, d]) + load(added[n, d]), rows[n, d])
