"""Quantiles of what was counted, to within 2 %: buckets that grow by a constant factor, as in DDSketch.

The buckets of /metrics are a contract with its scrapers, and too coarse to show a percentile as a number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

ERROR = 0.02
_GROWTH = (1 + ERROR) / (1 - ERROR)
_SCALE = 1 / math.log(_GROWTH)
_SMALLEST, _LARGEST = 1e-5, 1e4  # seconds; they bound the number of buckets, to about 520


class QuantileSketch:
    """Counts positive values by bucket; bucket `i` ends at the growth factor to the power of `i`."""

    __slots__ = ("_counts", "_snapshot")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._snapshot: Mapping[int, int] | None = {}

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value, `count` times."""
        bucket = math.ceil(math.log(min(max(value, _SMALLEST), _LARGEST)) * _SCALE)
        self._counts[bucket] = self._counts.get(bucket, 0) + count
        self._snapshot = None

    def observe_all(self, values: Sequence[float]) -> None:
        """Add each of `values`."""
        for value in values:
            self.observe(value)

    def snapshot(self) -> Mapping[int, int]:
        """Return the counts at this moment by bucket; the same mapping while nothing is added."""
        if self._snapshot is None:
            self._snapshot = dict(self._counts)
        return self._snapshot


def added_between(before: Mapping[int, int], after: Mapping[int, int]) -> Counter[int]:
    """Return what was added between two moments."""
    if before is after:
        return Counter()
    return Counter({bucket: more for bucket, count in after.items() if (more := count - before.get(bucket, 0))})


def sketch_quantile(counts: Mapping[int, int], share: float) -> float | None:
    """Return the value that `share` of the counted values do not exceed; None if there are none."""
    wanted = share * sum(counts.values())
    below = 0
    for bucket in sorted(counts):
        below += counts[bucket]
        if below >= wanted:
            return 2 * _GROWTH**bucket / (_GROWTH + 1)  # no value of the bucket is further from it than the error
    return None
