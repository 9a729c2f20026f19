"""How long a GPU takes: what is measured when a model loads, to choose between ways to compute the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

_REPEATS = 5


def recorded(run: Callable[[], object]) -> Callable[[], None]:
    """Return a function that replays what `run` launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], None] = graph.replay
    return replay


def median_seconds(run: Callable[[], None]) -> float:
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
