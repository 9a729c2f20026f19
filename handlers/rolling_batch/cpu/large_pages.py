"""Large pages for the memory of weights.

Reading weights is most of the time of few rows. With pages of 4 KiB it took 10 to 45 % longer on a virtual machine: the
processor looks up the addresses of pages in two tables there, and they are too many for its buffers.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

_PAGE = 2**21  # bytes of a large page
_HUGEPAGE, _COLLAPSE = 14, 25  # MADV_*; of mmap's only objects of its own can be advised
_PAUSE = 9  # times as long as the page in front of it took: moving takes a tenth of the time of one core


def use_large_pages(arrays: Iterable[np.ndarray]) -> int:
    """Have the kernel move the memory of `arrays` to large pages; return how many it has moved.

    Addresses stay. Pages that belong to other memory for more than half are left as they are. A kernel before Linux 6.1
    moves none at once, and may do so later (madvise(2): MADV_COLLAPSE, MADV_HUGEPAGE).
    """
    pages = _pages(arrays)
    advise = _advice()
    moved = 0
    for first, count in _ranges(pages):
        advise(first * _PAGE, count * _PAGE, _HUGEPAGE)
        # Before each call the kernel empties the buffers of all cores. One for each page took 0.4 to 0.6 s for the 270
        # MB of SmolLM2-135M where one for all takes 0.08. One page that cannot be moved makes a call fail.
        if advise(first * _PAGE, count * _PAGE, _COLLAPSE) == 0:
            moved += count
        else:
            moved += sum(advise(page * _PAGE, _PAGE, _COLLAPSE) == 0 for page in range(first, first + count))
    return moved


def use_large_pages_later(arrays: Iterable[np.ndarray]) -> threading.Thread:
    """Do it page by page in a thread, which is returned, beside what else the process does.

    Where the host of a virtual machine has to find the memory first, a page takes 4 ms: 0.6 s for SmolLM2-135M. Threads
    that touch the page wait for it, so that a load would gain nothing from moving many at once beside it.
    """
    moving = threading.Thread(target=_move_slowly, args=(list(arrays),), name="large-pages", daemon=True)
    moving.start()
    return moving


def _move_slowly(arrays: list[np.ndarray]) -> None:
    advise = _advice()
    for page in _pages(arrays):
        began = time.monotonic()
        advise(page * _PAGE, _PAGE, _HUGEPAGE)
        advise(page * _PAGE, _PAGE, _COLLAPSE)
        time.sleep(_PAUSE * (time.monotonic() - began))


def _advice() -> Callable[[int, int, int], int]:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return advise


def _pages(arrays: Iterable[np.ndarray]) -> list[int]:
    """Return the numbers of the pages that belong to `arrays` for more than half, sorted; none where Linux is not."""
    if sys.platform != "linux":
        return []
    covered: collections.Counter[int] = collections.Counter()
    for array in arrays:
        address, end = array.ctypes.data, array.ctypes.data + array.nbytes
        while address < end:
            page = address // _PAGE
            after = min(end, (page + 1) * _PAGE)
            covered[page] += after - address
            address = after
    return sorted(page for page, used in covered.items() if used > _PAGE // 2)


def _ranges(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first one of each row of pages that follow each other, and how many they are; the pages are sorted."""
    for _, group in itertools.groupby(enumerate(pages), lambda numbered: numbered[1] - numbered[0]):
        row = [page for _, page in group]
        yield row[0], len(row)
