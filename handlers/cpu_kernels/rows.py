"""Operations on the rows of activations and logits, each in one pass over memory, parallel over rows."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import math

import numpy as np

from handlers.cpu_kernels.arguments import NO_TOKEN
from handlers.cpu_kernels.compilation.decorators import kernel, kernel_part
from handlers.cpu_kernels.inlined import drawn_from, exp, greatest, gumbel_of, tokens_above
from handlers.cpu_kernels.intrinsics import empty, finite, larger, load, store
from handlers.cpu_kernels.threads.parallel import in_threads

# So many logits of a row are one piece of work: the threads that computed them have some of them in their caches.
_SECTION = 8192
# Each draw leaves half of the greater tokens on average: far fewer are needed, unless logits are NaN.
_MAX_DRAWS = 256


@kernel()
def rms_norm(rows, weight, eps, out):
    """`rows / rms(rows) * weight`: (n, width) -> (n, width), rounded before the product, as by Llama's norm."""
    in_threads(_rms_norm, len(rows), (rows, weight, eps, out))


@kernel_part(fastmath=True)
def _rms_norm(first, last, rows, weight, eps, out):
    for n in range(first, last):
        _norm_row(rows[n], weight, eps, out[n])


@kernel_part()
def add_and_norm(rows, added, weight, eps, out):
    """Add `added` to `rows`, in place, and write the RMS norm of the sums: all (n, width) but the weight (width,)."""
    in_threads(_add_and_norm, len(rows), (rows, added, weight, eps, out))


@kernel_part(fastmath=True)
def _add_and_norm(first, last, rows, added, weight, eps, out):
    for n in range(first, last):
        row, more = rows[n], added[n]
        for d in range(len(row)):
            row[d] = store(load(row[d]) + load(more[d]), row[d])
        _norm_row(row, weight, eps, out[n])


@kernel_part(fastmath=True, forceinline=True)
def _norm_row(row, weight, eps, out):
    squares = np.float32(0)
    for d in range(len(row)):
        element = load(row[d])
        squares += element * element
    factor = np.float32(1) / np.float32(math.sqrt(squares / len(row) + eps))
    for d in range(len(row)):
        normed = load(store(load(row[d]) * factor, row[d]))
        out[d] = store(normed * load(weight[d]), row[d])


@kernel()
def silu_and_mul(gate_up, out):
    """`silu(gate) * up` of a fused projection: (n, 2 * width) -> (n, width).

    The activation is rounded to the element type before it is multiplied, as in transformers' own code.
    """
    in_threads(_silu_and_mul, len(out), (gate_up, out))


@kernel_part(fastmath=True)
def _silu_and_mul(first, last, gate_up, out):
    width = out.shape[1]
    for n in range(first, last):
        gates, ups, target = gate_up[n, :width], gate_up[n, width:], out[n]
        for d in range(width):
            gate = load(gates[d])
            activated = load(store(gate / (np.float32(1) + exp(-gate)), gates[d]))
            target[d] = store(activated * load(ups[d]), gates[d])


@kernel()
def rotate(rows, cosines, sines, heads):
    """Apply rotary position embeddings in place to the first `heads` heads of each row (Su et al., RoFormer, 2021).

    rows (n, width) of heads beside each other; cosines, sines (n, dim): the halves of a head form its pairs.
    """
    in_threads(_rotate, len(rows), (rows, cosines, sines, heads))


@kernel_part(fastmath=True)
def _rotate(first, last, rows, cosines, sines, heads):
    dim = cosines.shape[1]
    half = dim // 2
    # Slices, because numba lets an index be negative. LLVM turns a loop into vector instructions if it sees that none
    # is, which it does for an index that begins at 0.
    for n in range(first, last):
        low_cosines, high_cosines = cosines[n, :half], cosines[n, half:]
        low_sines, high_sines = sines[n, :half], sines[n, half:]
        for head in range(heads):
            begin = head * dim
            lows, highs = rows[n, begin : begin + half], rows[n, begin + half : begin + dim]
            for d in range(half):
                low, high = load(lows[d]), load(highs[d])
                lows[d] = store(low * load(low_cosines[d]) - high * load(low_sines[d]), lows[d])
                highs[d] = store(high * load(high_cosines[d]) + low * load(high_sines[d]), highs[d])


@kernel()
def argmax_rows(logits, best, told):
    """Write the index of the greatest logit of each row, the first of equals: (n, vocabulary) -> best (n,) int64.

    told (n,) int64: what `tell_tokens` writes for them.
    """
    sections = -(-logits.shape[1] // _SECTION)
    found = empty((len(logits), sections), np.int64)
    in_threads(_argmax_sections, len(logits) * sections, (logits, sections, found))
    for n in range(len(logits)):
        best[n] = found[n, 0]
        for section in range(1, sections):
            if load(logits[n, found[n, section]]) > load(logits[n, best[n]]):
                best[n] = found[n, section]
    tell_tokens(logits, best, told)


@kernel_part()
def _argmax_sections(first, last, logits, sections, found):
    for piece in range(first, last):
        n, begin = piece // sections, piece % sections * _SECTION
        found[n, piece % sections] = begin + greatest(logits[n, begin : begin + _SECTION])


@kernel()
def tell_tokens(logits, tokens, told):
    """Write tokens (n,) to `told`, NO_TOKEN where the logit is not finite: of NaN no token is the greatest."""
    for n in range(len(tokens)):
        logit = logits[n, tokens[n]]
        told[n] = tokens[n] if finite(logit) == logit else NO_TOKEN


@kernel()
def log_sum_exp_rows(logits, result):
    """Write log(sum(exp(row))) of each row: (n, vocabulary) -> result (n,) float32."""
    in_threads(_log_sum_exp_rows, len(logits), (logits, result))


@kernel_part(fastmath=True)
def _log_sum_exp_rows(first, last, logits, result):
    for n in range(first, last):
        highest = np.float32(-np.inf)
        for v in range(logits.shape[1]):
            highest = larger(highest, load(logits[n, v]))
        total = np.float32(0)
        for v in range(logits.shape[1]):
            total += exp(load(logits[n, v]) - highest)
        result[n] = highest + math.log(total)


@kernel()
def draw_rows(logits, temperatures, keys, top_p, min_p, drawn):
    """Write the index of the greatest sum of logit and Gumbel noise among the tokens that `top_p` and `min_p` leave.

    logits (n, vocabulary), which are divided by temperatures (n,) float32, keys (n,) uint64, top_p and min_p (n,)
    float32 -> drawn (n,) int64.

    What is left are the tokens from some logit on. Instead of sorting for it, the tokens with a smaller logit than any
    one that proves to be outside are left out, and the draw is repeated.
    """
    in_threads(_draw_rows, len(logits), (logits, temperatures, keys, top_p, min_p, drawn))


@kernel_part(fastmath=True)
def _draw_rows(first, last, logits, temperatures, keys, top_p, min_p, drawn):
    for n in range(first, last):
        row, factor = logits[n], np.float32(1) / temperatures[n]
        best = greatest(row)
        highest, least = load(row[best]) * factor, np.float32(-3e38)
        if min_p[n] > 0:
            least = highest + np.float32(math.log(min_p[n]))
        drawn[n] = drawn_from(row, factor, keys[n], best, least)
        if top_p[n] < 1:
            mass = np.float32(0)
            for v in range(len(row)):
                mass += exp(load(row[v]) * factor - highest)
            for _ in range(_MAX_DRAWS):
                above, least = tokens_above(row, factor, load(row[drawn[n]]) * factor, highest)
                if above < top_p[n] * mass or above == 0:
                    break
                drawn[n] = drawn_from(row, factor, keys[n], best, least)


@kernel()
def draw_columns(logits, ids, keys, drawn):
    """Write the column of the greatest sum of logit and Gumbel noise: logits, ids (n, m), keys (n,) -> drawn (n,)."""
    in_threads(_draw_columns, len(logits), (logits, ids, keys, drawn))


@kernel_part(fastmath=True)
def _draw_columns(first, last, logits, ids, keys, drawn):
    for n in range(first, last):
        drawn[n] = 0
        highest = np.float32(-3e38)
        for column in range(logits.shape[1]):
            total = logits[n, column] + gumbel_of(keys[n], ids[n, column])
            if total > highest:
                drawn[n], highest = column, total


@kernel()
def masked_argmax_rows(logits, rows, masks, best):
    """Write the index of the greatest logit that a mask allows: rows (n,) of logits, masks (n, words) -> best (n,).

    A mask has a bit per logit, the lowest first. Most words are zero where a grammar allows little, and all ones inside
    texts; both are fast.
    """
    in_threads(_masked_argmax_rows, len(rows), (logits, rows, masks, best))


@kernel_part(fastmath=True)
def _masked_argmax_rows(first, last, logits, rows, masks, best):
    width = logits.shape[1]
    for n in range(first, last):
        row = rows[n]
        best[n] = 0
        highest = np.float32(-np.inf)
        for w in range(masks.shape[1]):
            bits = masks[n, w]
            if bits == np.uint32(0):
                continue
            start = 32 * w
            end = min(start + 32, width)
            if bits == np.uint32(0xFFFFFFFF):
                inside = np.float32(-np.inf)
                for v in range(start, end):
                    inside = larger(inside, load(logits[row, v]))
                if not inside > highest:
                    continue
            for v in range(start, end):
                if (bits >> np.uint32(v - start)) & np.uint32(1):
                    value = load(logits[row, v])
                    if value > highest:
                        best[n], highest = v, value


@kernel()
def mask_rows(logits, rows, masks):
    """Set the logits that the masks do not allow to minus infinity, in place; the arguments of `masked_argmax_rows`."""
    in_threads(_mask_rows, len(rows), (logits, rows, masks))


@kernel_part()
def _mask_rows(first, last, logits, rows, masks):
    width = logits.shape[1]
    for n in range(first, last):
        row = rows[n]
        for w in range((width + 31) // 32):
            bits = masks[n, w] if w < masks.shape[1] else np.uint32(0)
            if bits == np.uint32(0xFFFFFFFF):
                continue
            start = 32 * w
            for v in range(start, min(start + 32, width)):
                if not (bits >> np.uint32(v - start)) & np.uint32(1):
                    logits[row, v] = -np.inf
