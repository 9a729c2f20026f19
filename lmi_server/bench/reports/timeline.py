"""What a run looked like over time: requests in flight and tokens per second in steps of equal length."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lmi_server.bench.records import Record

_MAX_STEPS = 240
_STEPS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Values per step of `step_s` seconds; `times` are the starts of the steps, from the start of the run.

    `in_flight` is the mean of a step: a request that follows another does not count as a second one.
    """

    step_s: float
    times: Sequence[float]
    in_flight: Sequence[float]
    ended_per_s: Sequence[float]
    failed_per_s: Sequence[float]
    tokens_per_s: Sequence[float]


def start_of(records: Sequence[Record]) -> float:
    """Return when the first request was due."""
    return min((record.due for record in records), default=0.0)


def timeline(records: Sequence[Record]) -> Timeline:
    """Return what happened in each step of the run."""
    start = start_of(records)
    seconds = max((record.end - start for record in records), default=0.0)
    step = next((step for step in _STEPS_S if seconds / step <= _MAX_STEPS), _STEPS_S[-1])
    count = int(seconds / step) + 1
    changes, parts, ended, failed, tokens = ([0.0] * count for _ in range(5))

    def place(at: float) -> int:
        return min(max(int((at - start) / step), 0), count - 1)

    for record in records:
        for at, sign in ((record.due, 1), (record.end, -1)):
            changes[place(at)] += sign
            parts[place(at)] += sign * ((at - start) / step - place(at))
        (failed if record.error else ended)[place(record.end)] += 1
        for at, number in _token_times(record):
            tokens[place(at)] += number
    return Timeline(
        step,
        [number * step for number in range(count)],
        [level - part for level, part in zip(itertools.accumulate(changes), parts, strict=True)],
        *([value / step for value in values] for values in (ended, failed, tokens)),
    )


def _token_times(record: Record) -> Iterator[tuple[float, float]]:
    """Yield when tokens came, and how many. The tokens of a request are shared out equally among its events."""
    if record.first is None:
        yield record.end, record.output_tokens if record.is_good else 0
        return
    tokens = record.output_tokens / max(record.events, 1)
    for at in itertools.accumulate(record.gaps, initial=record.first):
        yield at, tokens
