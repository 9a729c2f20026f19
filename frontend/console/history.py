"""The figures of the last hour, which a page of the console draws as soon as it opens.

Of the last five minutes there is every sample, of the hour a point for each ten seconds. They lie in rings of a fixed
size: those for all models together, and those for each of the models that had requests last.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SPAN_S = 300.0
HOUR_S = 3600.0
COLUMNS = (
    "time", "tokens", "requests", "running", "queue", "kv", "hits",
    "ttft_p50", "ttft_p95", "ttft_p99", "itl_p50", "itl_p95", "itl_p99",
)  # fmt: skip
_PLAIN = COLUMNS[1:7]
_ACTIVE = ("tokens", "requests", "running", "queue")
_WIDTH = len(COLUMNS)
_POINTS = 400  # five minutes of samples in 0.75 seconds
_STEP_S = 10.0
_STEPS = 361  # an hour of them, and the one that began before it
_MODELS = 50  # with rings of their own, of 77 KiB
_MEANS = (1, 2)  # the columns that are rates
_PEAKS = (3, 4, 5)  # the columns whose highest value counts
_NONE = (math.nan,) * 3

Point = Sequence[float]


class History:
    """The points of all models together, under "", and of the models that were active last, by label."""

    def __init__(self) -> None:
        self._all = _Series()
        self._series: dict[str, _Series] = {}  # the least recently active first

    @property
    def size_bytes(self) -> int:
        """Return what the points take."""
        return self._all.size_bytes + sum(series.size_bytes for series in self._series.values())

    def add(self, label: str, at: float, row: Mapping[str, Any]) -> None:
        """Add the figures of a model, or of all under "", at a time.time()."""
        if not label:
            self._all.add(_point(at, row))
        elif any(row.get(name) for name in _ACTIVE):
            self._add_active(label, at, row)
        elif (series := self._series.get(label)) is not None:
            self._add_idle(label, series, at, row)

    def _add_active(self, label: str, at: float, row: Mapping[str, Any]) -> None:
        series = self._series.pop(label, None) or _Series()
        self._series[label] = series
        series.active_at = at
        series.add(_point(at, row))
        if len(self._series) > _MODELS:
            del self._series[next(iter(self._series))]

    def _add_idle(self, label: str, series: _Series, at: float, row: Mapping[str, Any]) -> None:
        if at - series.active_at > HOUR_S:
            del self._series[label]
        else:
            series.add(_point(at, row))

    def keep(self, labels: Mapping[str, Any]) -> None:
        """Forget every model but these."""
        for label in self._series.keys() - labels.keys():
            del self._series[label]

    def points(self, label: str, since: float, span_s: float = SPAN_S) -> list[Point]:
        """Return the points of a model from a time.time() on, the oldest first; none if it was not active.

        A span above SPAN_S has a point for each ten seconds.
        """
        series = self._series.get(label) if label else self._all
        return [] if series is None else [point for point in series.points(span_s) if point[0] >= since]


class _Series:
    """The points of one model: the last samples, and the last steps of ten seconds."""

    def __init__(self) -> None:
        self.active_at = 0.0
        self._samples = _Ring(_POINTS)
        self._steps = _Ring(_STEPS)
        self._step: list[Point] = []  # the samples of the step that is not complete

    @property
    def size_bytes(self) -> int:
        return self._samples.size_bytes + self._steps.size_bytes

    def add(self, point: Point) -> None:
        self._samples.add(point)
        if self._step and (point[0] - self._step[0][0] >= _STEP_S or len(self._step) >= _POINTS):
            self._steps.add(_together(self._step))
            self._step = []
        self._step.append(point)

    def points(self, span_s: float) -> Iterator[Point]:
        if span_s <= SPAN_S:
            yield from self._samples
            return
        yield from self._steps
        if self._step:
            yield _together(self._step)


def _together(points: Sequence[Point]) -> Point:
    """Return one point for several: means of rates, peaks of numbers. Percentiles are of ten seconds already."""
    whole = list(points[-1])
    for column in (*_MEANS, *_PEAKS):
        known = [point[column] for point in points if not math.isnan(point[column])]
        if known:
            whole[column] = sum(known) / len(known) if column in _MEANS else max(known)
    return whole


class _Ring:
    """The last points, in one block of memory."""

    def __init__(self, points: int) -> None:
        self._points = points
        self._values = array("d", [math.nan]) * (_WIDTH * points)
        self._next = 0

    @property
    def size_bytes(self) -> int:
        return len(self._values) * self._values.itemsize

    def add(self, point: Point) -> None:
        start = self._next * _WIDTH
        self._values[start : start + _WIDTH] = array("d", point)
        self._next = (self._next + 1) % self._points

    def __iter__(self) -> Iterator[Point]:
        for index in range(self._next, self._next + self._points):
            start = index % self._points * _WIDTH
            point = self._values[start : start + _WIDTH]
            if not math.isnan(point[0]):
                yield point.tolist()


def _point(at: float, row: Mapping[str, Any]) -> Point:
    plain = [_number(row.get(name)) for name in _PLAIN]
    return [at, *plain, *(row.get("ttft") or _NONE), *(row.get("itl") or _NONE)]


def _number(value: float | None) -> float:
    return math.nan if value is None else value
