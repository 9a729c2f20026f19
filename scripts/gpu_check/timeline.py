"""When a device works and when it waits, from the times of its kernels."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]
"""Begin and end in microseconds."""


def busy_and_gaps(spans: Iterable[Span]) -> tuple[float, list[float]]:
    """Return how many microseconds at least one span covers, and the gaps between those that touch no other."""
    busy, gaps, end = 0.0, [], None
    for begin, finish in sorted(spans):
        if end is None or begin > end:
            if end is not None:
                gaps.append(begin - end)
            busy += finish - begin
            end = finish
        elif finish > end:
            busy += finish - end
            end = finish
    return busy, gaps
