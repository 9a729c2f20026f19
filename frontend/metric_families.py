"""Makes Prometheus' families of histograms and plain values, at a scrape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily
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


def histogram(name: str, text: str, values: Mapping[str, Histogram], label: str = "model") -> Family:
    """Return a family of histograms by the value of `label`. Exemplars show in OpenMetrics only."""
    family = HistogramMetricFamily(name, text, labels=(label,))
    for key, each in values.items():
        family.add_metric((key,), _buckets(each), each.sum)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = list(histogram.cumulative())
    for index, (trace_id, value, at) in histogram.exemplars.items():
        bound, count = buckets[index][:2]
        buckets[index] = (bound, count, Exemplar({"trace_id": trace_id}, value, at))
    return buckets
