"""Families of metrics, and their text in Prometheus' format and in OpenMetrics.

prometheus_client has such writers too. They check and escape every label of every sample each time: for 50 models they
take 160 to 300 ms where all of a scrape takes 17 to 22 here, and requests wait meanwhile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

from lmi_server.contract.histogram import Histogram

Labels = tuple[str, ...]
LabelPairs = tuple[tuple[str, str], ...]

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})
_CREATED = "_created"


class HistogramFamily(Family):
    """A family of histograms, which are most of a scrape: without a sample for each of their buckets.

    `entries` are the labels of each histogram, the histogram, and by what its values are multiplied.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, text, "histogram")
        self.entries: list[tuple[LabelPairs, Histogram, float]] = []


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


def histogram(
    name: str, text: str, labels: Labels, values: Iterable[tuple[Labels, Histogram]], scale: float = 1
) -> Family:
    """Return a family of histograms, each under its labels. Exemplars show in OpenMetrics only."""
    family = HistogramFamily(name, text)
    family.entries = [(tuple(zip(labels, key, strict=True)), each, scale) for key, each in values]
    return family


def sample_names(family: Family) -> set[str]:
    """Return the names under which a scrape may ask for a family: its own, and those of its samples."""
    names = {family.name, *(sample.name for sample in family.samples)}
    if isinstance(family, HistogramFamily):
        names |= {f"{family.name}_{what}" for what in ("bucket", "count", "sum")}
    return names


def text_format(families: Iterable[Family]) -> bytes:
    """Return the families in Prometheus' text format, version 0.0.4, which knows no exemplars."""
    lines: list[str] = []
    for first, *others in _by_name(families).values():
        name = f"{first.name}_total" if first.type == "counter" else first.name
        kind = "untyped" if first.type == "unknown" else first.type
        lines += _head(name, kind, first.documentation)
        for family in (first, *others):
            lines += _lines(family, with_exemplars=False)
    return "".join(lines).encode(errors="replace")


def open_metrics(families: Iterable[Family]) -> bytes:
    """Return the families in OpenMetrics 1.0.

    The times at which an engine made its metrics are left out: in the text format they are families of their own, whose
    names OpenMetrics keeps for the metrics themselves.
    """
    by_name = _by_name(families)
    lines: list[str] = []
    for name, alike in by_name.items():
        if name.endswith(_CREATED) and name.removesuffix(_CREATED) in by_name:
            continue
        lines += _head(name, alike[0].type, alike[0].documentation)
        for family in alike:
            lines += _lines(family, with_exemplars=True)
    return "".join([*lines, "# EOF\n"]).encode(errors="replace")


def _by_name(families: Iterable[Family]) -> Mapping[str, Sequence[Family]]:
    """Return the families of each name: every engine has the same ones, and Prometheus allows only one head of each."""
    by_name: dict[str, list[Family]] = {}
    for family in families:
        by_name.setdefault(family.name, []).append(family)
    return by_name


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text.translate(_HELP_ESCAPES)}\n"
    yield f"# TYPE {name} {kind}\n"


def _lines(family: Family, with_exemplars: bool) -> Iterator[str]:
    for sample in family.samples:
        yield f"{sample.name}{_labels(tuple(sample.labels.items()))} {_number(sample.value)}\n"
    if isinstance(family, HistogramFamily):
        for labels, each, scale in family.entries:
            yield from _histogram(family.name, labels, each, scale, with_exemplars)


def _histogram(name: str, labels: LabelPairs, histogram: Histogram, scale: float, with_exemplars: bool) -> list[str]:
    """Return the lines of a histogram, those of its buckets first."""
    *buckets, count, total = _beginnings(name, labels, tuple(histogram.bounds), scale)
    counts = list(accumulate(histogram.counts))
    lines = [f"{beginning}{each}.0\n" for beginning, each in zip(buckets, counts, strict=True)]
    if with_exemplars:
        for index, (trace_id, value, at) in histogram.exemplars.items():
            lines[index] = f'{lines[index][:-1]} # {{trace_id="{trace_id}"}} {_number(value)} {at}\n'
    return [*lines, f"{count}{counts[-1]}.0\n", f"{total}{_number(histogram.sum * scale)}\n"]


# A scrape shows the same labels as the one before.
@functools.lru_cache(2048)
def _beginnings(name: str, labels: LabelPairs, bounds: tuple[float, ...], scale: float) -> list[str]:
    """Return what the lines of a histogram have in front of their numbers: of the buckets, the count and the sum."""
    ends = [_bound(bound * scale) for bound in (*bounds, math.inf)]
    buckets = [f"{name}_bucket{_labels((*labels, ('le', end)))} " for end in ends]
    return [*buckets, *(f"{name}_{what}{_labels(labels)} " for what in ("count", "sum"))]


def _bound(bound: float) -> str:
    """Return an upper bound as Prometheus' own clients write it."""
    return "+Inf" if math.isinf(bound) else str(float(round(bound, 9)))


@functools.lru_cache(8192)
def _labels(labels: LabelPairs) -> str:
    if not labels:
        return ""
    return "{" + ",".join([f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(labels)]) + "}"


def _number(value: float) -> str:
    value = float(value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
