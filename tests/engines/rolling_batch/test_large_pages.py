"""Memory of weights on large pages."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import time
from pathlib import Path

import numpy as np
import pytest

from handlers.rolling_batch.cpu.large_pages import use_large_pages

PAGE = 2**21
_FIXED = 0x10  # MAP_FIXED


def large_bytes() -> int:
    found = re.search(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return 0 if found is None else int(found[1]) * 1024


def memory(pages: int) -> np.ndarray:
    """Return `pages` whole pages of 2 MiB, filled with numbers."""
    area = mmap.mmap(-1, (pages + 1) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room = np.frombuffer(area, np.uint8)
    first = -room.ctypes.data % PAGE
    room = room[first : first + pages * PAGE]
    room[:] = np.arange(pages * PAGE, dtype=np.uint32).view(np.uint8)[: pages * PAGE]
    return room


def test_memory_is_moved_and_keeps_its_contents() -> None:
    room = memory(4)
    expected, address, before = room.copy(), room.ctypes.data, large_bytes()
    moved = use_large_pages([room[: 2 * PAGE], room[2 * PAGE :]])
    assert room.ctypes.data == address
    assert np.array_equal(room, expected)
    assert large_bytes() - before >= moved * PAGE
    if tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 1):
        # A machine whose memory is in pieces has no large page until it has tidied up.
        deadline = time.monotonic() + 120.0
        while use_large_pages([room]) < 4:
            assert time.monotonic() < deadline
            time.sleep(1.0)
        assert np.array_equal(room, expected)


def test_a_page_that_cannot_be_moved_keeps_no_other_from_it(tmp_path: Path) -> None:
    whole, room = memory(4), memory(4)
    if use_large_pages([whole]) < 4:
        pytest.skip("the machine has no large pages at once")
    place = ctypes.CDLL(None).mmap
    place.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    place.restype = ctypes.c_void_p
    with open(tmp_path / "page", "w+b") as file:
        file.truncate(PAGE)
        at = room.ctypes.data + PAGE
        assert place(at, PAGE, mmap.PROT_READ, mmap.MAP_PRIVATE | _FIXED, file.fileno(), 0) == at
    assert use_large_pages([room]) == 3
    assert use_large_pages([whole[:PAGE], whole[2 * PAGE :]]) == 3


def test_pages_that_belong_to_others_for_the_most_part_stay() -> None:
    room = memory(2)
    assert use_large_pages([room[: PAGE // 3], room[PAGE + PAGE // 2 :]]) == 0
    assert use_large_pages([]) == 0


def test_weights_on_one_page_together_count_together() -> None:
    room = memory(1)
    parts = [room[first : first + PAGE // 8] for first in range(0, PAGE, PAGE // 4)]
    assert use_large_pages(parts) == 0  # half of it
    assert use_large_pages([*parts, room[PAGE // 8 : PAGE // 4]]) == use_large_pages([memory(1)])
