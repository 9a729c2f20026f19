"""Metrics printed by models, and of the life of models and server: under the names that they come with."""

from __future__ import annotations

import logging
import re
import socket
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric as Family

from frontend.observability.metrics.catalogue import DJL_NAMES
from frontend.observability.metrics.exposition import HistogramFamily, LabelPairs
from lmi_server.contract.histogram import Histogram
from lmi_server.contract.metrics import COUNTER, GAUGE, HISTOGRAM, Metric

logger = logging.getLogger(__name__)

HOST = socket.gethostname()

_UNITS = {"Microseconds": 1e6, "Milliseconds": 1e3, "Seconds": 1.0}  # in one second
# For histograms that models print: seconds, from a cached embedding to a long generation; or counts.
_TIMES = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_COUNTS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000)
_MAX_SERIES = 2000  # that models may make: each takes memory for as long as the server runs
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


class RecordedMetrics:
    """The families of recorded values, by name. The number of their series is bounded."""

    def __init__(self) -> None:
        self._families: dict[str, _RecordedFamily] = {}
        self._series: Counter[str] = Counter()  # by the model that made them
        self._refused: set[str] = set()  # names about which a warning was logged

    def record(self, metric: Metric) -> None:
        """Add a value to the family of its name. A value that cannot be shown there is dropped, with a warning."""
        name = _family_name(metric.name)
        family = self._families.get(name)
        if family is None:
            family = _RecordedFamily(name, metric)
        labels = _labels(metric)
        is_new = labels not in family.values
        obstacle = self._obstacle(family, metric, is_new)
        if obstacle is not None:
            self._warn(metric.name, obstacle)
            return
        self._series[metric.model] += is_new
        self._families[name] = family
        family.add(labels, metric.value)

    def families(self) -> Iterator[Family]:
        """Yield a family for each name."""
        for family in self._families.values():
            yield family.family()

    def _obstacle(self, family: _RecordedFamily, metric: Metric, is_new: bool) -> str | None:
        if family.name in DJL_NAMES or family.name.startswith("lmi_"):
            return "the server has a metric of that name; choose another"
        if family.kind != _kind(metric):
            return "its first value was of another kind; use one of c, g and h for all"
        if family.kind == COUNTER and metric.value < 0:
            return "a counter cannot fall; print it as a gauge, with |g at the end"
        if is_new and self._series[metric.model] >= self._share(metric.model):
            count = self._series.total()
            return f"there are {count} series already, of at most {_MAX_SERIES}; print fewer names and dimensions"
        return None

    def _share(self, model: str) -> int:
        """Return how many series a model may have: as many as are left, so that none can take the room of all others.

        The server itself, whose names and dimensions are few, may have all.
        """
        return _MAX_SERIES - self._series.total() if model else _MAX_SERIES

    def _warn(self, name: str, obstacle: str) -> None:
        if name not in self._refused and len(self._refused) < _MAX_SERIES:
            self._refused.add(name)
            logger.warning("metric %s is not counted: %s", name, obstacle)


class _RecordedFamily:
    """The values of one name, by labels; for a histogram, its sums."""

    def __init__(self, name: str, first: Metric) -> None:
        self.name = name
        self.kind = _kind(first)
        self.values: dict[LabelPairs, float] = {}
        self._unit = first.unit
        self._histograms: dict[LabelPairs, Histogram] = {}

    def add(self, labels: LabelPairs, value: float) -> None:
        if self.kind == GAUGE:
            self.values[labels] = value
            return
        self.values[labels] = self.values.get(labels, 0.0) + value
        if self.kind == HISTOGRAM:
            self._histogram(labels).observe(value)

    def _histogram(self, labels: LabelPairs) -> Histogram:
        if labels not in self._histograms:
            scale = _UNITS.get(self._unit)
            bounds = _COUNTS if scale is None else [round(bound * scale, 9) for bound in _TIMES]
            self._histograms[labels] = Histogram(bounds)
        return self._histograms[labels]

    def family(self) -> Family:
        text = f"Unit: {self._unit}."
        if self.kind == HISTOGRAM:
            histograms = HistogramFamily(self.name, text)
            histograms.entries = [(labels, each, 1) for labels, each in self._histograms.items()]
            return histograms
        family = Family(self.name, text, "counter" if self.kind == COUNTER else "gauge")
        for labels, value in self.values.items():
            family.add_sample(self.name + ("_total" if self.kind == COUNTER else ""), dict(labels), value)
        return family


def _kind(metric: Metric) -> str:
    """Return the kind of a metric; one that says none is a counter if its unit is Count, as in LMI."""
    return metric.kind or (COUNTER if metric.unit == "Count" else GAUGE)


def _family_name(name: str) -> str:
    """Return Prometheus' name, without the `_total` that it adds to a counter's."""
    clean = _NOT_A_NAME.sub("_", name).removesuffix("_total")
    return f"_{clean}" if clean[:1].isdigit() or not clean else clean


def _labels(metric: Metric) -> LabelPairs:
    pairs = metric.dimensions or (("Host", HOST),)
    return tuple(sorted({_label_name(name): value for name, value in pairs}.items()))


def _label_name(name: str) -> str:
    clean = _NOT_A_NAME.sub("_", name)
    if clean.startswith("__"):  # Prometheus keeps such labels to itself
        return f"_{clean.lstrip('_')}"
    return f"_{clean}" if clean[:1].isdigit() or clean == "le" else clean
