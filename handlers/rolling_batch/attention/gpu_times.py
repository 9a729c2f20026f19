"""How long a GPU takes: what is measured when a model loads, to choose between ways to compute the same."""

from __future__ import annotations

import statistics
import time
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


def launch_share(run: Callable[[], object]) -> float:
    """Return which share of the time of `run` the host takes to launch it: about 1 if the GPU waits for the host."""
    run()
    launched, finished = 0.0, 0.0
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        launched += time.perf_counter() - began
        torch.cuda.synchronize()
        finished += time.perf_counter() - began
    return launched / finished
