"""The parts of a kernel that run in numba's threads share out what there is to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from handlers.cpu_kernels.compilation.decorators import kernel_part
from handlers.cpu_kernels.threads import helpers
from handlers.cpu_kernels.threads.parallel import in_threads

# Prints how many kernels were found on disk. Nothing in it starts numba's threads but the kernel.
_NORM = """
import numpy as np
from handlers.cpu_kernels.rows import rms_norm

rows = np.full((5, 4), 2, np.float32)
rms_norm(rows, np.ones(4, np.float32), 0.0, rows)
assert (rows == 1).all()
print(sum(rms_norm.stats.cache_hits.values()))
"""


@kernel_part()
def _count(first: int, last: int, visits: np.ndarray, runs: np.ndarray, settings: tuple[float, int]) -> None:
    runs[first] += settings[1]
    for place in range(first, last):
        visits[place] += settings[0]


def _count_all(count: int) -> tuple[np.ndarray, np.ndarray]:
    visits, runs = np.zeros(count), np.zeros(count, np.int64)
    in_threads(_count, count, (visits, runs, (0.5, 1)))
    return visits, runs


_counted: Any = numba.njit(_count_all)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 1000])
@pytest.mark.parametrize("threads", [1, 2])
def test_each_number_is_in_the_share_of_one_thread(count: int, threads: int) -> None:
    helpers.stop()  # a region of theirs has two shares for each thread
    former = numba.get_num_threads()
    threads = min(threads, numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(threads)
    try:
        visits, runs = _counted(count)
    finally:
        numba.set_num_threads(former)
    assert visits.tolist() == [0.5] * count
    assert runs.sum() == min(count, threads)


@pytest.mark.slow
def test_a_kernel_from_disk_finds_the_threads(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    found = [
        subprocess.run(
            [sys.executable, "-c", _NORM], env=environment, check=True, capture_output=True, text=True
        ).stdout
        for _ in range(2)
    ]
    assert found == ["0\n", "1\n"]
