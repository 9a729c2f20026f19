"""Small functions that numba inlines into kernels."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# numba infers the types of a kernel from its arguments; annotations would have no effect, and docstrings give shapes.

from __future__ import annotations

import numpy as np
from numba import njit

from handlers.rolling_batch.cpu_kernels.intrinsics import power_of_two


@njit(fastmath=True, inline="always")
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


@njit(inline="always")
def dealt(work, count, threads):
    """Return which of `count` pieces of work to do as number `work`; `count` or more means none.

    prange gives each thread a run of neighbouring numbers, of which there are `-(-count // threads) * threads`. Pieces
    next to each other cost about the same (the rows of one sequence, say), so that a run of them would leave threads
    idle. Here they are dealt to the threads in turns.
    """
    share = -(-count // threads)
    return work % share * threads + work // share
