"""Makes Prometheus' families of histograms and plain values, at a scrape."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, Sample
from prometheus_client.core import Metric as Family

from lmi_server.contract.histogram import Histogram

Labels = tuple[str, ...]


def counter(name: str, text: str, labels: Labels, values: Iterable[tuple[Labels, float]]) -> Family:
    """Return the counter `name`, which gets `_total` behind it, with each of `values` under its labels."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family


def gauge(name: str, text: str, labels: Labels, values: Iterable[tuple[Labels, float]]) -> Family:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values:
        family.add_metric(key, float(value))
    return family


class HistogramFamily(Family):
    """A family of histograms. They are most of a scrape, and are written without a sample for each of their buckets.

    `samples` are made once somebody asks for them, and are what is written from then on. `entries` are the labels of
    each histogram, itself, and by what its values are multiplied.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, text, "histogram")
        del self.samples  # so that the property is found
        self.entries: list[tuple[dict[str, str], Histogram, float]] = []

    @functools.cached_property
    def samples(self) -> list[Sample]:  # type: ignore[override]  # an attribute in the class of prometheus_client
        return [sample for entry in self.entries for sample in self._samples_of(*entry)]

    @property
    def has_samples(self) -> bool:
        return "samples" in vars(self)

    def _samples_of(self, labels: dict[str, str], histogram: Histogram, scale: float) -> Iterator[Sample]:
        for index, (bound, count) in enumerate(histogram.cumulative(scale)):
            found = histogram.exemplars.get(index)
            exemplar = None if found is None else Exemplar({"trace_id": found.trace_id}, found.value, found.time)
            yield Sample(f"{self.name}_bucket", {**labels, "le": bound}, count, None, exemplar)
        yield Sample(f"{self.name}_count", {**labels}, sum(histogram.counts))
        yield Sample(f"{self.name}_sum", {**labels}, histogram.sum * scale)


def histogram(name: str, text: str, values: Mapping[str, Histogram], label: str = "model", scale: float = 1) -> Family:
    """Return a family of histograms by the value of `label`. Exemplars show in OpenMetrics only."""
    family = HistogramFamily(name, text)
    family.entries = [({label: key}, each, scale) for key, each in values.items()]
    return family


def labelled(families: Iterable[Family], name: str, value: str) -> Iterator[Family]:
    """Add a label to everything in these families."""
    for family in families:
        if isinstance(family, HistogramFamily) and not family.has_samples:
            family.entries = [({**labels, name: value}, each, scale) for labels, each, scale in family.entries]
        else:
            for sample in family.samples:
                sample.labels[name] = value
        yield family
