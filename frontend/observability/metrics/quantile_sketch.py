"""Quantiles of what was counted, to within 2 %: buckets that grow by a constant factor, as in DDSketch.

The buckets of /metrics are a contract with its scrapers, and too coarse to show a percentile as a number.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

ERROR = 0.02
_GROWTH = (1 + ERROR) / (1 - ERROR)
_SMALLEST, _LARGEST = 1e-5, 1e4  # seconds; they bound the number of buckets, to about 520
_BOUNDS = [_SMALLEST * _GROWTH**i for i in range(math.ceil(math.log(_LARGEST / _SMALLEST, _GROWTH)))]
_bucket_of = partial(bisect_left, _BOUNDS)  # a look at a list costs less than a logarithm


class QuantileSketch:
    """Counts values in seconds by bucket; `_BOUNDS` are the upper bounds of all buckets but the last, inclusive."""

    __slots__ = ("_counts", "_snapshot")

    def __init__(self) -> None:
        self._counts = Counter[int]()
        self._snapshot: Mapping[int, int] | None = {}

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value, `count` times."""
        self._counts[_bucket_of(value)] += count
        self._snapshot = None

    def observe_all(self, values: Sequence[float]) -> None:
        """Add each of `values`; together they cost half of what they cost one by one."""
        if values:
            self._counts.update(map(_bucket_of, values))
            self._snapshot = None

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
            # No value of the bucket is further from it than the error.
            return 2 * _SMALLEST * _GROWTH**bucket / (_GROWTH + 1)
    return None
