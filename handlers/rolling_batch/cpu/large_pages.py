"""Large pages for the memory of weights.

Reading weights is most of the time of few rows. With pages of 4 KiB it took 10 to 45 % longer on a virtual machine: the
processor looks up the addresses of pages in two tables there, and they are too many for its buffers.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import sys
from collections.abc import Iterable, Iterator

import numpy as np

_PAGE = 2**21  # bytes of a large page
_HUGEPAGE, _COLLAPSE = 14, 25  # MADV_*; of mmap's only objects of its own can be advised


def use_large_pages(arrays: Iterable[np.ndarray]) -> int:
    """Have the kernel move the memory of `arrays` to large pages; return how many it has moved.

    Addresses stay. Pages that belong to other memory for more than half are left as they are. A kernel before Linux 6.1
    moves none at once, and may do so later (madvise(2): MADV_COLLAPSE, MADV_HUGEPAGE).
    """
    if sys.platform != "linux":
        return 0
    covered: collections.Counter[int] = collections.Counter()
    for array in arrays:
        address, end = array.ctypes.data, array.ctypes.data + array.nbytes
        while address < end:
            page = address // _PAGE
            after = min(end, (page + 1) * _PAGE)
            covered[page] += after - address
            address = after
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    moved = 0
    for first, count in _ranges(sorted(page for page, used in covered.items() if used > _PAGE // 2)):
        advise(first * _PAGE, count * _PAGE, _HUGEPAGE)
        # Before each call the kernel empties the buffers of all cores. One for each page took 0.4 to 0.6 s for the 270
        # MB of SmolLM2-135M where one for all takes 0.08. One page that cannot be moved makes a call fail.
        if advise(first * _PAGE, count * _PAGE, _COLLAPSE) == 0:
            moved += count
        else:
            moved += sum(advise(page * _PAGE, _PAGE, _COLLAPSE) == 0 for page in range(first, first + count))
    return moved


def _ranges(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first one of each row of pages that follow each other, and how many they are; the pages are sorted."""
    for _, group in itertools.groupby(enumerate(pages), lambda numbered: numbered[1] - numbered[0]):
        row = [page for _, page in group]
        yield row[0], len(row)
