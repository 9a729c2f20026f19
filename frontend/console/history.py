"""The figures of the last five minutes, which a page of the console draws as soon as it opens.

They lie in rings of a fixed size: one for all models together, and one for each of the models that had requests last.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SPAN_S = 300.0
COLUMNS = (
    "time", "tokens", "requests", "running", "queue", "kv", "hits",
    "ttft_p50", "ttft_p95", "ttft_p99", "itl_p50", "itl_p95", "itl_p99",
)  # fmt: skip
_PLAIN = COLUMNS[1:7]
_ACTIVE = ("tokens", "requests", "running", "queue")
_WIDTH = len(COLUMNS)
_POINTS = 400  # five minutes of samples in 0.75 seconds
_MODELS = 50  # with a ring of their own, of 40 KiB
_NONE = (math.nan,) * 3

Point = Sequence[float]


class History:
    """The points of all models together, under "", and of the models that were active last, by label."""

    def __init__(self) -> None:
        self._all = _Ring()
        self._rings: dict[str, _Ring] = {}  # the least recently active first

    @property
    def size_bytes(self) -> int:
        """Return what the points take."""
        return self._all.size_bytes + sum(ring.size_bytes for ring in self._rings.values())

    def add(self, label: str, at: float, row: Mapping[str, Any]) -> None:
        """Add the figures of a model, or of all under "", at a time.time()."""
        if not label:
            self._all.add(_point(at, row))
        elif any(row.get(name) for name in _ACTIVE):
            self._add_active(label, at, row)
        elif (ring := self._rings.get(label)) is not None:
            self._add_idle(label, ring, at, row)

    def _add_active(self, label: str, at: float, row: Mapping[str, Any]) -> None:
        ring = self._rings.pop(label, None) or _Ring()
        self._rings[label] = ring
        ring.active_at = at
        ring.add(_point(at, row))
        if len(self._rings) > _MODELS:
            del self._rings[next(iter(self._rings))]

    def _add_idle(self, label: str, ring: _Ring, at: float, row: Mapping[str, Any]) -> None:
        if at - ring.active_at > SPAN_S:
            del self._rings[label]
        else:
            ring.add(_point(at, row))

    def keep(self, labels: Mapping[str, Any]) -> None:
        """Forget every model but these."""
        for label in self._rings.keys() - labels.keys():
            del self._rings[label]

    def points(self, label: str, since: float) -> list[Point]:
        """Return the points of a model from a time.time() on, the oldest first; none if it was not active."""
        ring = self._rings.get(label) if label else self._all
        return [] if ring is None else [point for point in ring if point[0] >= since]


class _Ring:
    """The last points, in one block of memory."""

    def __init__(self) -> None:
        self.active_at = 0.0
        self._values = array("d", [math.nan]) * (_WIDTH * _POINTS)
        self._next = 0

    @property
    def size_bytes(self) -> int:
        return len(self._values) * self._values.itemsize

    def add(self, point: Point) -> None:
        start = self._next * _WIDTH
        self._values[start : start + _WIDTH] = array("d", point)
        self._next = (self._next + 1) % _POINTS

    def __iter__(self) -> Iterator[Point]:
        for index in range(self._next, self._next + _POINTS):
            start = index % _POINTS * _WIDTH
            point = self._values[start : start + _WIDTH]
            if not math.isnan(point[0]):
                yield point.tolist()


def _point(at: float, row: Mapping[str, Any]) -> Point:
    plain = [_number(row.get(name)) for name in _PLAIN]
    return [at, *plain, *(row.get("ttft") or _NONE), *(row.get("itl") or _NONE)]


def _number(value: float | None) -> float:
    return math.nan if value is None else value
