"""Attention of prompt chunks in bfloat16, in the tile registers of AMX."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import math

import numpy as np

from handlers.cpu_kernels import amx
from handlers.cpu_kernels.attention.packed_rows import rows_of
from handlers.cpu_kernels.compilation.decorators import kernel_part
from handlers.cpu_kernels.inlined import exp, fill, seen_columns, sink_weight
from handlers.cpu_kernels.intrinsics import empty, finite, larger, store, word, words_of, zeros
from handlers.cpu_kernels.threads.parallel import in_threads, shares_of

# Columns whose scores are computed before their weights, of BLOCK_ROWS rows: both stay in the L2 cache (384 KiB). Half
# as many took a tenth longer, and twice as many as long.
_SECTION = 2048
_LOWEST = np.float32(-3e38)  # below any score


def chunk_attention_in_tile_registers(query, keys, values, span, columns, out, settings):
    """Compute what `_chunk_attention` in chunk_attention.py does, for elements of bfloat16.

    Tiles are larger here, and their scores would not fit into the caches. So the softmax is computed section by
    section: the sums so far are multiplied by what a higher score in a new section makes of their weights (Milakov and
    Gimelshein, "Online normalizer calculation for softmax", 2018; as in FlashAttention).
    """
    farthest = columns.last_own[0]
    for last in columns.last_own:
        farthest = max(farthest, last)
    kv_heads, dim, value_dim = keys.shape[1], query.shape[2], out.shape[2]
    panels = -(-farthest // amx.PANEL_COLUMNS)
    value_panels = -(-value_dim // amx.PANEL_COLUMNS)
    laid_keys = empty((kv_heads, panels, _whole_steps(dim), amx.PANEL_COLUMNS), np.uint32)
    laid_values = empty((kv_heads, value_panels, panels * amx.STEP_WORDS, amx.PANEL_COLUMNS), np.uint32)
    cached = (keys, values, span.slot, span.first, farthest)
    in_threads(_lay_out_panels, kv_heads * panels, (cached, query, out, laid_keys, laid_values))
    shares = shares_of(settings.threads)
    in_threads(_attend_blocks, shares, (query, laid_keys, laid_values, farthest, columns, out, settings, shares))


@kernel_part()
def _whole_steps(elements):
    """Return how many words hold elements of bfloat16, rounded up to whole steps of the tile registers."""
    return -(-elements // (2 * amx.STEP_WORDS)) * amx.STEP_WORDS


@kernel_part()
def _lay_out_panels(first_work, last_work, cached, query, out, laid_keys, laid_values):
    """Lay out keys and values as `multiply_block` reads panels; the keys are transposed. Zeros fill them up.

    cached, query, out: as for `_laid_out`. laid_keys (kv_heads, panels of columns, words of
    a key, PANEL_COLUMNS); laid_values (kv_heads, panels of a value, words of columns, PANEL_COLUMNS). Zeros replace
    values that are not finite, for the reason that `_laid_out` gives.
    """
    keys, values, slot, offset, columns = cached
    panels, words = laid_keys.shape[1], laid_keys.shape[2]
    dim, value_dim, zero = query.shape[2], out.shape[2], query.dtype.type(0)
    room = empty((amx.PANEL_COLUMNS, dim), query.dtype), empty((amx.PANEL_COLUMNS, value_dim), query.dtype)
    for work in range(first_work, last_work):
        head, panel = work // panels, work % panels
        first, last = panel * amx.PANEL_COLUMNS, min((panel + 1) * amx.PANEL_COLUMNS, columns)
        laid, key = laid_keys[head, panel], rows_of(keys, slot, head, offset + first, offset + last, room[0])
        held = rows_of(values, slot, head, offset + first, offset + last, room[1])
        for place in range(words):
            even, odd = 2 * place, 2 * place + 1
            for column in range(amx.PANEL_COLUMNS):
                laid[place, column] = 0
            if odd < dim:
                for column in range(len(key)):
                    laid[place, column] = word(key[column, even], key[column, odd])
            elif even < dim:
                for column in range(len(key)):
                    laid[place, column] = word(key[column, even], zero)
        for place in range(amx.STEP_WORDS):
            even, odd = 2 * place, 2 * place + 1
            for of_value in range(laid_values.shape[1]):
                target = laid_values[head, of_value, panel * amx.STEP_WORDS + place]
                begin = of_value * amx.PANEL_COLUMNS
                count = min(amx.PANEL_COLUMNS, value_dim - begin)
                for d in range(amx.PANEL_COLUMNS):
                    target[d] = 0
                if odd < len(held):
                    value, neighbour = held[even, begin : begin + count], held[odd, begin : begin + count]
                    for d in range(count):
                        target[d] = word(finite(value[d]), finite(neighbour[d]))
                elif even < len(held):
                    value = held[even, begin : begin + count]
                    for d in range(count):
                        target[d] = word(finite(value[d]), zero)


@kernel_part(fastmath=True)
def _attend_blocks(first_share, last_share, query, laid_keys, laid_values, seen, columns, out, settings, shares):
    start, begin, first_own, last_own = columns.start, columns.begin, columns.first_own, columns.last_own
    scaling, softcap = np.float32(settings.scaling), np.float32(settings.softcap)
    factor = np.float32(1) if softcap > 0 else scaling  # of the highest scores
    window, chunk = settings.window, settings.chunk
    dim, value_dim, kv_heads, of_panel = query.shape[2], out.shape[2], len(laid_keys), amx.PANEL_COLUMNS
    group, like = query.shape[0] // kv_heads, query[0, 0, 0]
    rows, shared = len(first_own) * group, start - begin
    units = -(-rows // amx.BLOCK_ROWS)
    queries = zeros((amx.BLOCK_ROWS, 2 * laid_keys.shape[2]), query.dtype)
    # Rows are a cache line longer than needed: with a power of two all would compete for the same places of the cache.
    scores = empty((amx.BLOCK_ROWS, _SECTION + 16), np.float32)
    weights = empty((amx.BLOCK_ROWS, _SECTION + 32), query.dtype)
    product = empty((amx.BLOCK_ROWS, of_panel), np.float32)
    mixed = empty((amx.BLOCK_ROWS, laid_values.shape[1] * of_panel), np.float32)
    highest, total = empty(amx.BLOCK_ROWS, np.float32), empty(amx.BLOCK_ROWS, np.float32)
    sees = empty((amx.BLOCK_ROWS, 3), np.int64)
    configured = 0
    for share in range(first_share, last_share):
        for piece in range(share, kv_heads * units, shares):
            head, first = piece // units, piece % units * amx.BLOCK_ROWS
            count = min(amx.BLOCK_ROWS, rows - first)
            if count != configured:
                amx.configure_tiles(count)
                configured = count
            lowest, nearest, farthest = seen, seen, 0
            for r in range(count):
                row = first + r
                for d in range(dim):
                    queries[r, d] = query[head * group + row % group, row // group, d]
                low, own, last = seen_columns(first_own, last_own, row // group, start, begin, window, chunk)
                sees[r, 0], sees[r, 1], sees[r, 2] = low, own, last
                lowest, nearest, farthest = min(lowest, low), min(nearest, own), max(farthest, last)
                highest[r], total[r] = _LOWEST, 0
            fill(mixed, np.float32(0))
            # Panels of columns that some row sees; between the two ranges are columns of other sequences.
            ends = -(-shared // of_panel) if lowest < shared else 0
            begins = max(nearest // of_panel, ends)
            for from_panel, to_panel in ((lowest // of_panel, ends), (begins, -(-farthest // of_panel))):
                for section in range(from_panel, to_panel, _SECTION // of_panel):
                    after = min(section + _SECTION // of_panel, to_panel)
                    for panel in range(section, after):
                        column = (panel - section) * of_panel
                        area = scores[:, column : column + of_panel]
                        amx.multiply_block(words_of(queries), 0, count, laid_keys[head, panel], area, False)
                    column, width = section * of_panel, (after - section) * of_panel
                    for r in range(count):
                        low, own, last = sees[r, 0] - column, sees[r, 1] - column, sees[r, 2] - column
                        parts = (
                            _within(low, width),
                            _within(shared - column, width),
                            _within(own, width),
                            _within(last, width),
                        )
                        kept = _weigh(scores[r, :width], weights[r, :width], parts, scaling, softcap, highest, total, r)
                        if kept < 1:
                            for d in range(value_dim):
                                mixed[r, d] *= kept
                    for value_panel in range(laid_values.shape[1]):
                        area = laid_values[head, value_panel, section * amx.STEP_WORDS : after * amx.STEP_WORDS]
                        amx.multiply_block(words_of(weights), 0, count, area, product, False)
                        for r in range(count):
                            sums = mixed[r, value_panel * of_panel : (value_panel + 1) * of_panel]
                            for d in range(of_panel):
                                sums[d] += product[r, d]
            for r in range(count):
                row = first + r
                query_head = head * group + row % group
                portion = np.float32(1) / (total[r] + sink_weight(settings.sinks, query_head, highest[r] * factor))
                target = out[row // group, query_head]
                for d in range(value_dim):
                    target[d] = store(mixed[r, d] * portion, like)
    amx.release_tiles()


@kernel_part(forceinline=True)
def _within(column, width):
    return min(max(column, 0), width)


@kernel_part(is_separate=True, fastmath=True)
def _weigh(score, weight, parts, scaling, softcap, highest, total, row):
    """Write the weights of a section, not divided by their sum yet; return by what those of former sections change.

    `parts`: the row sees columns from the first to the second number, and from the third to the fourth. Its highest
    score so far and the sum of its weights are in `highest` and `total`; `score` is overwritten.
    """
    former, factor = highest[row], scaling
    most, added = former, np.float32(0)
    for part in range(2):
        scored = score[parts[0] : parts[1]] if part == 0 else score[parts[2] : parts[3]]
        if softcap > 0:
            for t in range(len(scored)):
                scored[t] = softcap * math.tanh(scored[t] * scaling / softcap)
            factor = np.float32(1)
        for t in range(len(scored)):
            most = larger(most, scored[t])
    zero = store(np.float32(0), weight[0])
    for hidden in (weight[: parts[0]], weight[max(parts[0], parts[1]) : parts[2]], weight[max(parts[1], parts[3]) :]):
        for t in range(len(hidden)):
            hidden[t] = zero
    for part in range(2):
        scored = score[parts[0] : parts[1]] if part == 0 else score[parts[2] : parts[3]]
        weighed = weight[parts[0] : parts[1]] if part == 0 else weight[parts[2] : parts[3]]
        for t in range(len(scored)):
            scored[t] = exp((scored[t] - most) * factor)
            added += scored[t]
        for t in range(len(scored)):
            weighed[t] = store(scored[t], zero)
    kept = np.float32(0)
    if total[row] > 0:
        kept = exp((former - most) * factor)
    highest[row], total[row] = most, total[row] * kept + added
    return kept
