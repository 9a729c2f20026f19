"""Two things measured in pairs: the median of their ratios, and an interval that holds the true one.

Each ratio is above the true median with probability one half, for any distribution. So the interval from the k-th
lowest to the k-th highest ratio misses it with a binomial probability. From the lowest to the highest of 6 ratios the
confidence is 97 %; with fewer it is below 95 %.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class PairedRatios:
    """Ratios in increasing order, at least one; `left_out` at each end are outside of the interval."""

    values: tuple[float, ...]
    left_out: int

    @classmethod
    def from_values(cls, values: Iterable[float]) -> PairedRatios:
        """Return them with the narrowest interval whose confidence is 95 % or more, or with all of them."""
        ordered = tuple(sorted(values))
        return cls(ordered, _bounds(len(ordered))[0])

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """Return the bounds that hold the true median with `confidence`."""
        return self.values[self.left_out], self.values[-1 - self.left_out]

    @property
    def confidence(self) -> float:
        """Return the probability that the interval holds the true median."""
        return _bounds(len(self.values))[1]


@functools.lru_cache(4096)
def _bounds(count: int) -> tuple[int, float]:
    """Return how many of `count` values at each end can be left out of the interval, and its confidence."""
    ways, missed = 1, 1  # of k values above the true median, and of up to k
    left_out, confidence = 0, 1 - 2 / 2**count if count else 0.0
    for k in range(1, (count + 1) // 2):
        ways = ways * (count - k + 1) // k
        missed += ways
        held = 1 - 2 * missed / 2**count
        if held < _CONFIDENCE:
            break
        left_out, confidence = k, held
    return left_out, confidence
