"""How long a GPU takes: what is measured when a model loads, to choose between ways to compute the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

_REPEATS = 5


def median_seconds(run: Callable[[], object]) -> float:
    """Return the median of some runs, timed on the device, behind one that is not."""
    run()
    times: list[float] = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)
