"""A histogram of plain numbers, cheap to add to."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Exemplar(NamedTuple):
    """One value of a bucket, with the trace that it belongs to, at `time` (time.time())."""

    trace_id: str
    value: float
    time: float


class Histogram:
    """Counts values by bucket; `bounds` are the upper bounds of all buckets but the last, inclusive."""

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}  # the last of each bucket, by the bucket's index

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def observe_all(self, values: list[float]) -> None:
        """Add each of `values`, which are sorted here: many cost far less together than one by one."""
        if not values:
            return
        values.sort()
        below = 0
        for index, bound in enumerate(self.bounds):
            reached = bisect_right(values, bound, below)
            self.counts[index] += reached - below
            below = reached
        self.counts[-1] += len(values) - below
        self.sum += sum(values)

    def mark(self, value: float, trace_id: str, at: float) -> None:
        """Keep a value that was observed `at` a time.time() as the exemplar of its bucket."""
        self.exemplars[bisect_left(self.bounds, value)] = Exemplar(trace_id, value, at)

    def add(self, other: Histogram) -> None:
        """Add the values of a histogram with the same bounds."""
        self.counts = [own + more for own, more in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Return the value that `share` of the counted values do not exceed, as Prometheus' histogram_quantile has it.

    It lies within a bucket in proportion; values above all bounds count as the highest bound. None if there are none.
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    below, lower = 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if below + count >= wanted:
            return lower + (bound - lower) * (wanted - below) / count
        below, lower = below + count, bound
    return lower
