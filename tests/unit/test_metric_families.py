"""Histograms are written without samples, and read as if they had them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from prometheus_client.core import Metric as Family

from frontend.observability.metrics.exposition import open_metrics, text_format
from frontend.observability.metrics.families import histogram, labelled
from lmi_server.contract.histogram import Histogram


def families() -> list[Family]:
    """Return histograms of two models, one of them with exemplars, and the same in microseconds with another label."""
    used, unused = Histogram((0.001, 0.5, 1, 20)), Histogram((0.001, 0.5, 1, 20))
    for value in (0.0005, 0.001, 0.7, 0.7, 100):
        used.observe(value)
    used.mark(0.7, "4bf92f3577b34da6a3ce929d0e0e4736", 1_700_000_000.25)
    used.mark(100, "5bf92f3577b34da6a3ce929d0e0e4736", 1_700_000_001.5)
    odd = 'with "quotes", a \\ and\na line'
    [scaled] = labelled([histogram("micro", "In microseconds.", {"b": used}, "Model", 1e6)], "model", "b:1")
    return [histogram("seconds", "In seconds.", {"a": used, odd: unused}), scaled, histogram("none", "Of nothing.", {})]


@pytest.mark.parametrize("write", [text_format, open_metrics])
def test_a_histogram_is_written_as_its_samples_are(write: Callable[[Iterable[Family]], bytes]) -> None:
    directly, by_samples = families(), families()
    assert [len(family.samples) for family in by_samples] == [14, 7, 0]
    text = write(directly).decode()
    assert text == write(by_samples).decode()
    assert 'micro_bucket{Model="b",le="500000.0",model="b:1"} 2.0' in text
    assert 'seconds_count{model="a"} 5.0' in text
    assert text.count("trace_id=") == (4 if write is open_metrics else 0)


def test_a_sample_that_is_changed_is_written_so() -> None:
    [family] = labelled([histogram("seconds", "In seconds.", {"a": Histogram((1,))})], "worker", "w-1")
    family.samples[0].labels["more"] = "yes"
    assert b'seconds_bucket{le="1.0",model="a",more="yes",worker="w-1"} 0.0\n' in text_format([family])
