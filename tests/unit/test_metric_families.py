"""Families are written as prometheus_client writes them, with names and labels as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics

from frontend.observability.metrics import catalogue
from frontend.observability.metrics.exposition import counter, gauge, histogram, open_metrics, text_format
from frontend.observability.metrics.model_metrics import AdapterCounts, ModelMetrics
from lmi_server.contract.histogram import Histogram

ODD = 'with "quotes", a \\ and\na line'
TRACES = ("4bf92f3577b34da6a3ce929d0e0e4736", "5bf92f3577b34da6a3ce929d0e0e4736")
VALUES = [(("a", "b:1"), 1.0), (("é", ODD), 2.5), (("", "none"), float("inf"))]
LABELS = ("model", "worker")


def own_families() -> list[Family]:
    times = Histogram((0.001, 0.5, 1, 20))
    for value in (0.0005, 0.001, 0.7, 0.7, 100):
        times.observe(value)
    times.mark(0.7, TRACES[0], 1_700_000_000.25)
    times.mark(100, TRACES[1], 1_700_000_001.5)
    return [
        counter("requests", "Odd \\ text\nof two lines.", LABELS, VALUES),
        gauge("depth", "Depth.", LABELS, VALUES),
        histogram("seconds", "In seconds.", LABELS, [(("a", ODD), times)]),
        histogram("micro", "In microseconds.", LABELS, [(("a", "b"), times)], scale=1000.0),
        histogram("none", "Of nothing.", LABELS, []),
    ]


def families_of_prometheus_client(with_exemplars: bool) -> list[Family]:
    counts = CounterMetricFamily("requests", "Odd \\ text\nof two lines.", labels=LABELS)
    depths = GaugeMetricFamily("depth", "Depth.", labels=LABELS)
    for key, value in VALUES:
        counts.add_metric(key, value)
        depths.add_metric(key, value)
    found: list[Family] = [counts, depths]
    for name, text, labels, scale in (
        ("seconds", "In seconds.", ("a", ODD), 1.0),
        ("micro", "In microseconds.", ("a", "b"), 1000.0),
    ):
        exemplars: list[Any] = [None] * 5
        if with_exemplars:
            exemplars[2] = Exemplar({"trace_id": TRACES[0]}, 0.7, 1_700_000_000.25)
            exemplars[4] = Exemplar({"trace_id": TRACES[1]}, 100, 1_700_000_001.5)
        bounds = [*(str(float(round(bound * scale, 9))) for bound in (0.001, 0.5, 1, 20)), "+Inf"]
        buckets = list(zip(bounds, (2, 2, 4, 4, 5), exemplars, strict=True))
        family = HistogramMetricFamily(name, text, labels=LABELS)
        family.add_metric(labels, buckets, sum_value=101.4015 * scale)  # type: ignore[arg-type]
        found.append(family)
    return [*found, HistogramMetricFamily("none", "Of nothing.", labels=LABELS)]


@pytest.mark.parametrize(
    ("write", "reference", "with_exemplars"),
    [(text_format, generate_latest, False), (open_metrics, generate_open_metrics, True)],
)
def test_families_are_written_as_prometheus_client_does(write: Any, reference: Any, with_exemplars: bool) -> None:
    registry = SimpleNamespace(collect=lambda: families_of_prometheus_client(with_exemplars))
    assert write(own_families()).decode() == reference(registry).decode()


def test_families_of_one_name_have_one_head() -> None:
    parts = [gauge("depth", "Depth.", ("model",), [((name,), 1.0)]) for name in ("a", "b")]
    assert text_format(parts).decode() == (
        '# HELP depth Depth.\n# TYPE depth gauge\ndepth{model="a"} 1.0\ndepth{model="b"} 1.0\n'
    )


def test_every_row_of_requests_names_what_is_counted() -> None:
    counts, model = AdapterCounts(), ModelMetrics("model")
    assert [row.key for row in catalogue.TOKENS if not hasattr(counts, row.key)] == []
    assert [row.key for row in catalogue.HISTOGRAMS if row.key not in model.histograms] == []


@pytest.mark.parametrize("column", ["name", "vllm", "djl_serving", "cloudwatch"])
def test_no_name_is_given_twice(column: str) -> None:
    rows = (*catalogue.HISTOGRAMS, *catalogue.TOKENS, *catalogue.POOL_GAUGES, *catalogue.POOL_COUNTERS)
    names = [name for row in (*rows, *catalogue.POOL_HISTOGRAMS) if (name := getattr(row, column))]
    assert names
    assert len(names) == len(set(names))
