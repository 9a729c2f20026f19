"""Writes families of metrics in Prometheus' text format and in OpenMetrics.

prometheus_client has such writers too. They check and escape every label of every sample each time, which takes five
times as long: a server that is scraped every second would spend a hundredth of its time there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import Exemplar
from prometheus_client.core import Metric as Family

from frontend.observability.metrics.families import HistogramFamily
from lmi_server.contract.histogram import Histogram, written_bounds

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_CREATED = "_created"
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


def text_format(families: Iterable[Family]) -> bytes:
    """Return the families in Prometheus' text format, version 0.0.4, which knows no exemplars."""
    lines: list[str] = []
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        kind = "untyped" if family.type == "unknown" else family.type
        lines += _head(name, kind, family.documentation)
        if isinstance(family, HistogramFamily) and not family.has_samples:
            for labels, histogram, scale in family.entries:
                lines += _histogram(family.name, labels, histogram, scale)
            continue
        lines += [f"{sample.name}{_labels(sample.labels)} {_number(sample.value)}\n" for sample in family.samples]
    return "".join(lines).encode(errors="replace")


def open_metrics(families: Iterable[Family]) -> bytes:
    """Return the families in OpenMetrics 1.0.

    The times at which an engine made its metrics are left out: in the text format they are families of their own, whose
    names OpenMetrics keeps for the metrics themselves.
    """
    by_name = {family.name: family for family in families}
    lines: list[str] = []
    for family in by_name.values():
        if family.name.endswith(_CREATED) and family.name.removesuffix(_CREATED) in by_name:
            continue
        lines += _head(family.name, family.type, family.documentation)
        if isinstance(family, HistogramFamily) and not family.has_samples:
            for entry in family.entries:
                lines += _with_exemplars(_histogram(family.name, *entry), entry[1])
            continue
        for sample in family.samples:
            exemplar = _exemplar(sample.exemplar) if sample.exemplar else ""
            lines.append(f"{sample.name}{_labels(sample.labels)} {_number(sample.value)}{exemplar}\n")
    return "".join([*lines, "# EOF\n"]).encode(errors="replace")


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text.translate(_HELP_ESCAPES)}\n"
    yield f"# TYPE {name} {kind}\n"


def _histogram(name: str, labels: Mapping[str, str], histogram: Histogram, scale: float) -> list[str]:
    """Return the lines of a histogram, those of its buckets first."""
    *buckets, count, total = _beginnings(name, tuple(labels.items()), tuple(histogram.bounds), scale)
    counts = list(accumulate(histogram.counts))
    lines = [f"{beginning}{each}.0\n" for beginning, each in zip(buckets, counts, strict=True)]
    return [*lines, f"{count}{counts[-1]}.0\n", f"{total}{_number(histogram.sum * scale)}\n"]


def _with_exemplars(lines: list[str], histogram: Histogram) -> list[str]:
    for index, (trace_id, value, at) in histogram.exemplars.items():
        lines[index] = f'{lines[index][:-1]} # {{trace_id="{trace_id}"}} {_number(value)} {at}\n'
    return lines


@functools.lru_cache(2048)
def _beginnings(name: str, labels: tuple[tuple[str, str], ...], bounds: tuple[float, ...], scale: float) -> list[str]:
    """Return what the lines of a histogram have in front of their numbers: of the buckets, the count and the sum."""
    buckets = [f"{name}_bucket{_written_labels((*labels, ('le', bound)))} " for bound in written_bounds(bounds, scale)]
    return [*buckets, *(f"{name}_{what}{_written_labels(labels)} " for what in ("count", "sum"))]


def _labels(labels: Mapping[str, str]) -> str:
    return _written_labels(tuple(labels.items())) if labels else ""


# A scrape shows the same labels as the one before.
@functools.lru_cache(8192)
def _written_labels(labels: tuple[tuple[str, str], ...]) -> str:
    return "{" + ",".join([f'{name}="{_escaped(value)}"' for name, value in sorted(labels)]) + "}"


def _escaped(value: str) -> str:
    return value if value.isalnum() else value.translate(_ESCAPES)


def _number(value: float) -> str:
    value = float(value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _exemplar(exemplar: Exemplar) -> str:
    return f" # {_labels(exemplar.labels)} {_number(exemplar.value)} {exemplar.timestamp}"
