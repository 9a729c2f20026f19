"""What a trial gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

THROUGHPUT, GOODPUT = "output tokens/s", "good requests/s"
"""Units of the value of a trial: what its server generates within the limits, or the requests that keep them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial gave: `value` is what the search raises, in `unit`; None if nothing could be measured.

    `reason` says why there is no value, or why the trial was given up early (`is_pruned`). `figures` are those of the
    deciding run, at `concurrency` requests at a time.
    """

    value: float | None
    concurrency: int = 0
    figures: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    is_pruned: bool = False
    load_s: float = 0.0
    unit: str = THROUGHPUT


Measure = Callable[[Mapping[str, str], float], Outcome]
"""Measures settings; the second argument is the best value so far, far below which a trial may be given up."""


@dataclass(frozen=True, slots=True)
class TuneTrial:
    """One trial of a search; number -1 is the configuration as it is."""

    number: int
    settings: Mapping[str, str]
    outcome: Outcome


def best_of(trials: Sequence[TuneTrial]) -> TuneTrial | None:
    """Return the trial with the highest value; None if none has one."""
    valued = [trial for trial in trials if trial.outcome.value is not None and not trial.outcome.is_pruned]
    return max(valued, key=lambda trial: trial.outcome.value or 0.0, default=None)


def baseline_of(trials: Sequence[TuneTrial]) -> TuneTrial | None:
    """Return the trial of the configuration as it is; None if it was not measured."""
    return next((trial for trial in trials if trial.number < 0), None)


def pareto(trials: Sequence[TuneTrial], latency: str) -> list[TuneTrial]:
    """Return the Pareto front of throughput and p99 of `latency`, the slowest trial first."""
    points = [
        (trial.outcome.value, trial.outcome.figures[latency]["p99"], trial)
        for trial in trials
        if trial.outcome.value is not None and "p99" in trial.outcome.figures.get(latency, {})
    ]
    front = [
        (value, p99, trial)
        for value, p99, trial in points
        if not any((v >= value and p <= p99 and (v, p) != (value, p99)) for v, p, _ in points)
    ]
    return [trial for _, _, trial in sorted(front, key=lambda point: (point[0], point[1]))]
