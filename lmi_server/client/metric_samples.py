"""The samples of a server's /metrics, in Prometheus' text format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([-+.\deE]*\d|NaN|[-+]Inf)(?: \d+)?")


def samples_in(lines: Iterable[str]) -> Iterable[tuple[str, str, float]]:
    """Yield the name, the labels as they are written, and the value of each sample."""
    for line in lines:
        found = None if line.startswith("#") else _SAMPLE.fullmatch(line)
        if found is not None:
            yield found[1], found[2] or "", float(found[3])


def increase(before: Mapping[str, float], after: Mapping[str, float], key: str) -> float | None:
    """Return by how much a counter grew; from zero if it is new, or the server has started again."""
    if key not in after:
        return None
    grown = after[key] - before.get(key, 0.0)
    return after[key] if grown < 0 else grown
