"""CPU kernels of the decode step, compiled by numba when the model loads.

torch's own attention pays per call for one query token per sequence, and its bfloat16 element-wise operations run one
by one over memory; here each is one pass over it, parallel over rows. bfloat16 tensors come in as uint16 arrays (numpy
has no bfloat16) and are computed in float32.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic


@intrinsic
def _load(context, element):  # type: ignore[no-untyped-def]
    """Element of a cache or activation -> float32."""
    if element == types.float32:
        return types.float32(types.float32), lambda ctx, builder, sig, args: args[0]

    def widen(ctx, builder, sig, args):  # type: ignore[no-untyped-def]
        wide = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return types.float32(types.uint16), widen


@intrinsic
def _store(context, value, like):  # type: ignore[no-untyped-def]
    """float32 -> element of the type of `like`; bfloat16 is rounded to nearest, ties to even."""
    if like == types.float32:
        return types.float32(types.float32, like), lambda ctx, builder, sig, args: args[0]

    def narrow(ctx, builder, sig, args):  # type: ignore[no-untyped-def]
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        rounded = builder.add(builder.add(bits, ir.Constant(word, 0x7FFF)), odd)
        return builder.trunc(builder.lshr(rounded, ir.Constant(word, 16)), ir.IntType(16))

    return types.uint16(types.float32, like), narrow


@intrinsic
def _power_of_two(context, exponent):  # type: ignore[no-untyped-def]
    """2.0 ** exponent for an int32 from -126 to 127, built in the bits of a float32."""

    def build(ctx, builder, sig, args):  # type: ignore[no-untyped-def]
        word = ir.IntType(32)
        biased = builder.add(args[0], ir.Constant(word, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(word, 23)), ir.FloatType())

    return types.float32(types.int32), build


@intrinsic
def _told(context, address):  # type: ignore[no-untyped-def]
    """The int64 at an address in shared memory; nothing that follows is read before it."""

    def build(ctx, builder, sig, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.uintp), build


@intrinsic
def _tell(context, address, number):  # type: ignore[no-untyped-def]
    """Write an int64 to an address in shared memory, after all that was written before."""

    def build(ctx, builder, sig, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.int64), build


_yield_core = types.ExternalFunction("sched_yield", types.int32())


@njit(fastmath=True, inline="always")
def _exp(x):  # type: ignore[no-untyped-def]
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
    return p * _power_of_two(np.int32(whole))


@njit(parallel=True, fastmath=True, nogil=True, cache=True)
def slot_attention(  # type: ignore[no-untyped-def]
    query, key, value, keys, values, slots, positions, out, scaling, window, softcap
):
    """Write each row's key and value into its slot, then let it attend to the slot's tokens up to its own position.

    query (heads, rows, dim), key and value (kv_heads, rows, dim): any strides, of which the first `len(slots)` rows
    are read. keys, values: (slots, kv_heads, max_len, dim), contiguous. slots, positions: (n,) int64, several rows may
    be of one slot. out: (rows, heads, value_dim), contiguous. window: tokens seen, 0 for all. softcap: 0 for none.
    """
    dim, value_dim, kv_heads = query.shape[2], value.shape[2], key.shape[0]
    group = query.shape[0] // kv_heads
    for row in prange(len(slots)):
        for kv_head in range(kv_heads):
            slot_key = keys[slots[row], kv_head, positions[row]]
            slot_value = values[slots[row], kv_head, positions[row]]
            for d in range(dim):
                slot_key[d] = key[kv_head, row, d]
            for d in range(value_dim):
                slot_value[d] = value[kv_head, row, d]
    for work in prange(len(slots) * kv_heads):
        row, kv_head = work // kv_heads, work % kv_heads
        slot, last = slots[row], positions[row]
        slot_keys, slot_values = keys[slot, kv_head], values[slot, kv_head]
        begin = max(0, last + 1 - window) if window > 0 else 0
        count = last + 1 - begin
        scaled = np.empty((group, dim), np.float32)
        scores = np.empty((group, count), np.float32)
        mixed = np.zeros((group, value_dim), np.float32)
        for g in range(group):
            for d in range(dim):
                scaled[g, d] = _load(query[kv_head * group + g, row, d]) * scaling
        for t in range(count):
            for g in range(group):
                score = np.float32(0)
                for d in range(dim):
                    score += scaled[g, d] * _load(slot_keys[begin + t, d])
                scores[g, t] = score
        for g in range(group):
            if softcap > 0:
                for t in range(count):
                    scores[g, t] = softcap * math.tanh(scores[g, t] / softcap)
            highest = np.float32(-np.inf)
            for t in range(count):
                highest = max(highest, scores[g, t])
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
                    mixed[g, d] += weight * _load(slot_values[begin + t, d])
        for g in range(group):
            for d in range(value_dim):
                out[row, kv_head * group + g, d] = _store(mixed[g, d], out[row, 0, 0])


@njit(parallel=True, fastmath=True, nogil=True, cache=True)
def chunk_softmax(scores, weights, first_own, last_own, start, begin, scaling, window, softcap):  # type: ignore[no-untyped-def]
    """Softmax over the tokens that each row of a chunk may see; the others get weight zero.

    scores (kv_heads, group * rows, columns) float32, overwritten -> weights of the same shape. The first columns are
    tokens `begin` to `start` - 1, which all rows may see; beside them row r sees columns `first_own[r]` to
    `last_own[r]`, not included: token `start` and those after it up to its own. window: tokens seen, 0 for all.
    softcap: 0 for none.
    """
    heads, grouped, _ = scores.shape
    shared = max(start - begin, 0)
    for work in prange(heads * grouped):
        head, row = work // grouped, work % grouped
        own, last = first_own[row % len(first_own)], last_own[row % len(first_own)]
        seen = start + last - own  # tokens up to the row's own
        low = min(max(0, seen - window - begin), shared) if window > 0 else 0
        own = max(own + max(0, seen - window - start) if window > 0 else own, 0)
        score, weight = scores[head, row], weights[head, row]
        highest, total = np.float32(-np.inf), np.float32(0)
        for part in range(2):  # slices, because loops over them become vectors: their indices are never negative
            scored = score[low:shared] if part == 0 else score[own:last]
            if softcap > 0:
                for t in range(len(scored)):
                    scored[t] = softcap * math.tanh(scored[t] * scaling / softcap)
            else:
                for t in range(len(scored)):
                    scored[t] = scored[t] * scaling
            for t in range(len(scored)):
                highest = max(highest, scored[t])
        for part in range(2):
            scored = score[low:shared] if part == 0 else score[own:last]
            for t in range(len(scored)):
                scored[t] = _exp(scored[t] - highest)
            for t in range(len(scored)):
                total += scored[t]
        factor, zero = np.float32(1) / total, _store(np.float32(0), weight[0])
        for part in range(2):
            scored = score[low:shared] if part == 0 else score[own:last]
            weighed = weight[low:shared] if part == 0 else weight[own:last]
            for t in range(len(scored)):
                weighed[t] = _store(scored[t] * factor, zero)
        weight[: min(low, shared)] = zero
        weight[shared:own] = zero
        weight[last:] = zero


@njit(parallel=True, fastmath=True, nogil=True, cache=True)
def rms_norm(rows, weight, out, eps):  # type: ignore[no-untyped-def]
    """`rows / rms(rows)`, rounded to the element type, times `weight`: (n, width) -> (n, width), as Llama's norm."""
    width = rows.shape[1]
    for n in prange(rows.shape[0]):
        squares = np.float32(0)
        for d in range(width):
            element = _load(rows[n, d])
            squares += element * element
        factor = np.float32(1) / np.float32(math.sqrt(squares / width + eps))
        for d in range(width):
            normed = _load(_store(_load(rows[n, d]) * factor, rows[n, d]))
            out[n, d] = _store(normed * _load(weight[d]), rows[n, d])


@njit(parallel=True, fastmath=True, nogil=True, cache=True)
def argmax_rows(logits, best):  # type: ignore[no-untyped-def]
    """Index of the greatest logit of each row, the first of equals: (n, vocabulary) -> best (n,) int64."""
    width = logits.shape[1]
    block = 1024  # the greatest of a block is found with vector instructions, its place only in the best block
    for n in prange(logits.shape[0]):
        best[n] = 0
        best_block, highest = 0, np.float32(-np.inf)
        for start in range(0, width, block):
            inside = np.float32(-np.inf)
            for v in range(start, min(start + block, width)):
                inside = max(inside, _load(logits[n, v]))
            if inside > highest:
                best_block, highest = start, inside
        for v in range(best_block, min(best_block + block, width)):
            if _load(logits[n, v]) == highest:
                best[n] = v
                break


@njit(parallel=True, fastmath=True, nogil=True, cache=True)
def log_sum_exp_rows(logits, result):  # type: ignore[no-untyped-def]
    """log(sum(exp(row))) of each row: (n, vocabulary) -> result (n,) float32."""
    for n in prange(logits.shape[0]):
        highest = np.float32(-np.inf)
        for v in range(logits.shape[1]):
            highest = max(highest, _load(logits[n, v]))
        total = np.float32(0)
        for v in range(logits.shape[1]):
            total += _exp(_load(logits[n, v]) - highest)
        result[n] = highest + math.log(total)


@njit(parallel=True, fastmath=True, nogil=True, cache=True)
def silu_and_mul(gate_up, out):  # type: ignore[no-untyped-def]
    """`silu(gate) * up` of a fused projection: (n, 2 * width) -> (n, width)."""
    width = out.shape[1]
    for n in prange(out.shape[0]):
        for d in range(width):
            gate = _load(gate_up[n, d])
            activated = _load(_store(gate / (np.float32(1) + _exp(-gate)), gate_up[n, d]))
            out[n, d] = _store(activated * _load(gate_up[n, width + d]), gate_up[n, d])


@njit(parallel=True, fastmath=True, nogil=True, cache=True)
def rotate(rows, cosines, sines, heads):  # type: ignore[no-untyped-def]
    """Apply rotary position embeddings in place to the first `heads` heads of each row (Su et al., RoFormer, 2021).

    rows (n, width) of heads beside each other; cosines, sines (n, dim): the halves of a head form its pairs.
    """
    dim = cosines.shape[1]
    half = dim // 2
    for n in prange(rows.shape[0]):
        for head in range(heads):
            first = head * dim
            for d in range(half):
                low, high = _load(rows[n, first + d]), _load(rows[n, first + half + d])
                turned_low = low * _load(cosines[n, d]) - high * _load(sines[n, d])
                turned_high = high * _load(cosines[n, half + d]) + low * _load(sines[n, half + d])
                rows[n, first + d] = _store(turned_low, rows[n, first])
                rows[n, first + half + d] = _store(turned_high, rows[n, first])


@njit(nogil=True, fastmath=True, cache=True)
def sum_of_ranks(part, out, parts, counts, line, rank, count, total):  # type: ignore[no-untyped-def]
    """Sum `part` (n,) of every rank, in the order of the ranks, to `out` (n,); return `count` and the pieces added.

    Shared are parts (ranks, 2, piece) and, at the address `counts`, each `line` bytes, how many pieces a rank has put
    there; `count` are those of this rank so far. total (piece,) float32 is for the kernel's own use. A rank that puts
    a piece into one of its two places has seen all others begin with the piece before: nobody reads what was there.
    """
    ranks, _, piece = parts.shape
    for begin in range(0, len(part), piece):
        size = min(piece, len(part) - begin)
        place = count & 1
        own = parts[rank, place]
        for i in range(size):
            own[i] = part[begin + i]
        count += 1
        _tell(counts + np.uintp(rank * line), count)
        total[:size] = 0
        for other in range(ranks):
            looks = 0
            while _told(counts + np.uintp(other * line)) < count:
                looks += 1
                if looks % 256 == 0:  # whoever else wants the core: what is waited for may be what it computes
                    _yield_core()
            theirs = parts[other, place]
            for i in range(size):
                total[i] += _load(theirs[i])
        for i in range(size):
            out[begin + i] = _store(total[i], out[0])
    return count
