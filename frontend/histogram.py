"""A histogram of plain numbers, cheap to add to."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts values by bucket; `bounds` are the upper bounds of all buckets but the last, inclusive."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add(self, other: Histogram) -> None:
        """Add the values of a histogram with the same bounds."""
        self.counts = [own + more for own, more in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def cumulative(self, scale: float = 1) -> list[tuple[str, float]]:
        """Return for each upper bound, times `scale`, how many values are not above it, as Prometheus has it."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append((_written(bound * scale), total))
        return buckets


def _written(bound: float) -> str:
    """Return a bound as Prometheus' own clients write it."""
    return "+Inf" if math.isinf(bound) else str(float(round(bound, 9)))
