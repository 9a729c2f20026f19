"""A measured value with the name, unit and dimensions of LMI's metrics, and the line in which LMI writes it.

    RequestLatency.Microseconds:1520|#Model:demo|h

A model's code prints such a line behind `[METRICS]`, which begins the line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

MARK = "[METRICS]"
"""What begins a line with a metric."""

COUNTER, GAUGE, HISTOGRAM = "c", "g", "h"

_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_LINE = re.compile(
    rf"\s*(?P<name>\w[\w ]*)\.(?P<unit>[\w /]+):(?P<value>{_NUMBER})"
    r"(?:\|#(?P<dimensions>[^|]*))?(?:\|\d+)?(?:\|(?P<kind>[cgh]))?\s*",
    re.ASCII,
)


class Metric(NamedTuple):
    """One measured value. `dimensions` are pairs of name and value; without any, it belongs to the host.

    Without a `kind` a value of the unit Count is a counter and any other is a gauge, as in LMI. `model` is the one
    whose worker printed it, "" if the server measured it; it is not shown.
    """

    name: str
    unit: str
    value: float
    dimensions: tuple[tuple[str, str], ...] = ()
    kind: str | None = None
    model: str = ""

    def __str__(self) -> str:
        dimensions = ",".join(f"{name}:{value}" for name, value in self.dimensions)
        kind = f"|{self.kind}" if self.kind else ""
        return f"{self.name}.{self.unit}:{self.value:.15g}{f'|#{dimensions}' if dimensions else ''}{kind}"


MetricSink = Callable[[Metric], None]


def drop_metric(metric: Metric) -> None:
    """Drop `metric`."""


def parse_metric(text: str) -> Metric | None:
    """Return the metric in what follows `[METRICS]`; None if it is none. A time in it is not read."""
    match = _LINE.fullmatch(text)
    if match is None or not math.isfinite(value := float(match["value"])):
        return None
    dimensions = tuple(_dimensions(match["dimensions"] or ""))
    return Metric(match["name"].strip(), match["unit"].strip(), value, dimensions, match["kind"])


def _dimensions(text: str) -> Iterator[tuple[str, str]]:
    for pair in text.split(","):
        name, separator, value = pair.partition(":")
        if separator and name.strip():
            yield name.strip(), value.strip()
