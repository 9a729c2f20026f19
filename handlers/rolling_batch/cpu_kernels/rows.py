"""Operations on the rows of activations and logits, each in one pass over memory, parallel over rows."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import math

import numpy as np
from numba import prange

from handlers.rolling_batch.cpu_kernels.compilation import kernel
from handlers.rolling_batch.cpu_kernels.inlined import drawn_from, exp, gumbel_of, tokens_above
from handlers.rolling_batch.cpu_kernels.intrinsics import larger, load, store


@kernel(parallel=True, fastmath=True)
def rms_norm(rows, weight, eps, out):
    """`rows / rms(rows) * weight`: (n, width) -> (n, width), rounded before the product, as by Llama's norm."""
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


@kernel(parallel=True, fastmath=True)
def silu_and_mul(gate_up, out):
    """`silu(gate) * up` of a fused projection: (n, 2 * width) -> (n, width).

    The activation is rounded to the element type before it is multiplied, as in transformers' own code.
    """
    width = out.shape[1]
    for n in prange(out.shape[0]):
        for d in range(width):
            gate = load(gate_up[n, d])
            activated = load(store(gate / (np.float32(1) + exp(-gate)), gate_up[n, d]))
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


@kernel(parallel=True, fastmath=True)
def argmax_rows(logits, best):
    """Write the index of the greatest logit of each row, the first of equals: (n, vocabulary) -> best (n,) int64."""
    width = logits.shape[1]
    # Vector instructions find the greatest logit of a block; its index is searched in the best block only.
    block = 1024
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
    """Write log(sum(exp(row))) of each row: (n, vocabulary) -> result (n,) float32."""
    for n in prange(logits.shape[0]):
        highest = np.float32(-np.inf)
        for v in range(logits.shape[1]):
            highest = larger(highest, load(logits[n, v]))
        total = np.float32(0)
        for v in range(logits.shape[1]):
            total += exp(load(logits[n, v]) - highest)
        result[n] = highest + math.log(total)


@kernel(parallel=True, fastmath=True)
def draw_rows(logits, keys, top_p, min_p, drawn):
    """Write the index of the greatest sum of logit and Gumbel noise among the tokens that `top_p` and `min_p` leave.

    logits (n, vocabulary) float32, keys (n,) uint64, top_p and min_p (n,) float32 -> drawn (n,) int64.

    What is left are the tokens from some logit on. Instead of sorting for it, the tokens with a smaller logit than any
    one that proves to be outside are left out, and another one is drawn.
    """
    for n in prange(logits.shape[0]):
        row = logits[n]
        highest = np.float32(-3e38)
        for v in range(len(row)):
            highest = larger(highest, row[v])
        least = np.float32(-3e38)
        if min_p[n] > 0:
            least = highest + np.float32(math.log(min_p[n]))
        drawn[n] = drawn_from(row, keys[n], least)
        if top_p[n] < 1:
            mass = np.float32(0)
            for v in range(len(row)):
                mass += exp(row[v] - highest)
            while True:
                above, least = tokens_above(row, row[drawn[n]], highest)
                if above < top_p[n] * mass or above == 0:
                    break
                drawn[n] = drawn_from(row, keys[n], least)


@kernel(parallel=True, fastmath=True)
def draw_columns(logits, ids, keys, drawn):
    """Write the column of the greatest sum of logit and Gumbel noise: logits, ids (n, m), keys (n,) -> drawn (n,)."""
    for n in prange(logits.shape[0]):
        drawn[n] = 0
        highest = np.float32(-3e38)
        for column in range(logits.shape[1]):
            total = logits[n, column] + gumbel_of(keys[n], ids[n, column])
            if total > highest:
                drawn[n], highest = column, total


@kernel(parallel=True, fastmath=True)
def masked_argmax_rows(logits, rows, masks, best):
    """Write the index of the greatest logit that a mask allows: rows (n,) of logits, masks (n, words) -> best (n,).

    A mask has a bit per logit, the lowest first. Most words are zero where a grammar allows little, and all ones inside
    texts; both are fast.
    """
    width = logits.shape[1]
    for n in prange(rows.shape[0]):
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


@kernel(parallel=True)
def mask_rows(logits, rows, masks):
    """Set the logits that the masks do not allow to minus infinity, in place; the arguments of `masked_argmax_rows`."""
    width = logits.shape[1]
    for n in prange(rows.shape[0]):
        row = rows[n]
        for w in range((width + 31) // 32):
            bits = masks[n, w] if w < masks.shape[1] else np.uint32(0)
            if bits == np.uint32(0xFFFFFFFF):
                continue
            start = 32 * w
            for v in range(start, min(start + 32, width)):
                if not (bits >> np.uint32(v - start)) & np.uint32(1):
                    logits[row, v] = -np.inf
