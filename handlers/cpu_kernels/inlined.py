"""Small functions that numba inlines into kernels."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import math

import numpy as np

from handlers.cpu_kernels.compilation.decorators import kernel_part
from handlers.cpu_kernels.intrinsics import larger, load, power_of_two


@kernel_part(fastmath=True, forceinline=True)
def exp(x):
    """Return e ** x in float32, to about one unit in the last place, for x from -87 to 88.

    The C library's exp is a call for each element, and LLVM cannot turn a loop of calls into vector instructions. This
    one splits x / log(2) into a whole part, which becomes the exponent, and a rest in [-0.5, 0.5), whose power of two
    is a polynomial.
    """
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


@kernel_part(forceinline=True)
def uniform_of(key, token):
    """Return the uniform random number of a token under a uint64 key, above 0, at most 1; see gumbel.py."""
    word = key + np.uint64(token) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    word = word ^ (word >> np.uint64(31))
    return (np.float32(np.int32(word >> np.uint64(33))) + np.float32(0.5)) * np.float32(2.0**-31)


@kernel_part(forceinline=True)
def gumbel_of(key, token):
    """Return the Gumbel noise of a token under a uint64 key."""
    return np.float32(-math.log(-math.log1p(-uniform_of(key, token))))


@kernel_part(is_separate=True, fastmath=True)
def greatest(row):
    """Return the index of the greatest logit, the first of equals."""
    # Vector instructions find the greatest logit of a block; its index is searched in the best block only.
    block = 1024
    best, highest = 0, np.float32(-np.inf)
    for start in range(0, len(row), block):
        inside, part = np.float32(-np.inf), row[start : min(start + block, len(row))]
        for v in range(len(part)):
            inside = larger(inside, load(part[v]))
        if inside > highest:
            best, highest = start, inside
    for v in range(best, min(best + block, len(row))):
        if load(row[v]) == highest:
            return v
    return 0


@kernel_part(is_separate=True, fastmath=True)
def drawn_from(row, factor, key, best, least):
    """Return the index of the greatest sum of logit and Gumbel noise, among the logits of `least` and more.

    Logits are those of the row times a factor. `best` is the index of one of them, with which the search begins.

    The noise of a token is -log(-log(1 - u)) with u from the key and the token. That is at most -log(u), so that a
    token cannot win if exp(logit - highest) <= u. Vector instructions find the blocks that have tokens which can.
    """
    drawn, highest = best, load(row[best]) * factor + gumbel_of(key, best)
    block = 256
    for start in range(0, len(row), block):
        part = row[start : min(start + block, len(row))]
        lead = np.float32(-1)
        for v in range(len(part)):
            logit = load(part[v]) * factor
            ahead = exp(logit - highest) - uniform_of(key, start + v)
            lead = larger(lead, ahead if logit >= least else np.float32(-1))
        if lead > np.float32(0):
            for v in range(len(part)):
                logit = load(part[v]) * factor
                if logit >= least and exp(logit - highest) > uniform_of(key, start + v):
                    total = logit + gumbel_of(key, start + v)
                    if total > highest:
                        drawn, highest = start + v, total
    return drawn


@kernel_part(is_separate=True, fastmath=True)
def tokens_above(row, factor, logit, highest):
    """Return the mass of the tokens with a greater logit, as a sum of exp(logit - highest), and the least of these.

    Logits are those of the row times a factor.
    """
    mass, most = np.float32(0), np.float32(-3e38)
    for v in range(len(row)):
        other = load(row[v]) * factor
        is_above = other > logit
        mass += exp(other - highest) if is_above else np.float32(0)
        most = larger(most, -other if is_above else np.float32(-3e38))
    return mass, -most


@kernel_part(forceinline=True)
def first_seen(position, window, chunk):
    """Return the first token that the one at `position` sees under a window and a chunk, 0 for none."""
    first = max(0, position + 1 - window) if window > 0 else 0
    return max(first, position // chunk * chunk) if chunk > 0 else first


@kernel_part(forceinline=True)
def seen_columns(first_own, last_own, row, start, begin, window, chunk):
    """Return the columns that a row of a chunk may see, as three numbers: (first shared, first own, behind the last).

    It sees the shared columns from the first number on, and those from the second number up to the third.
    """
    own, last, shared = first_own[row], last_own[row], start - begin
    seen = start + last - own  # tokens up to the row's own
    if window <= 0 and chunk <= 0:
        return 0, own, last
    first = first_seen(seen - 1, window, chunk)
    return min(max(0, first - begin), shared), own + max(0, first - start), last


@kernel_part(forceinline=True)
def sink_weight(sinks, head, highest):
    """Return the weight of a head's sink beside scores whose highest one has weight 1; 0 without sinks."""
    return exp(sinks[head] - highest) if len(sinks) > 0 else np.float32(0)


@kernel_part()
def fill(array, number):
    for row in range(array.shape[0]):
        for column in range(array.shape[1]):
            array[row, column] = number
