"""How long a step takes by its number of rows, learnt from the steps themselves.

The time does not grow evenly with the rows: kernels compute tiles of several rows: a step which begins another tile
takes as long as one that fills it. So the time of each number of rows is kept by itself.

What was measured once may not hold any more, since sequences grow, and other programs come and go. A time that no step
confirms is forgotten after some steps, and estimated from its neighbours again. Then a draft may be tried that did not
pay before. If that confirms the time, it is kept for twice as many steps.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

_WEIGHT = 0.25  # of the newest step
_MAX_GROWTH = 2.0  # times the expected time; a step that takes longer was held up by something else
_CONFIRMED = 0.75  # of the time that was forgotten, or more
_MIN_STEPS, _MAX_STEPS = 256, 16384  # for which a time is kept


@dataclass(slots=True)
class _Time:
    """What steps with some number of rows take. It is forgotten after the step with the number `until`."""

    seconds: float
    until: int
    steps: int = _MIN_STEPS


class StepTimes:
    """Learns the times of steps, in any unit, by their numbers of rows.

    Before that, each further row takes `row_share` of the time of one row.
    """

    def __init__(self, row_share: float) -> None:
        self._row_share = row_share
        self._step = 0
        self._times: dict[int, _Time] = {}
        self._known: list[int] = []  # the numbers of rows whose times are not forgotten, in order

    def __call__(self, rows: int) -> float:
        """Return the time of a step with `rows` rows."""
        place = bisect.bisect_left(self._known, rows)
        above = self._known[place] if place < len(self._known) else None
        if above == rows:
            return self._times[rows].seconds
        below = self._known[place - 1] if place else None
        if below is None or above is None:
            return self._extrapolate(rows, below or above)
        share = (rows - below) / (above - below)
        return (1 - share) * self._times[below].seconds + share * self._times[above].seconds

    def _extrapolate(self, rows: int, known: int | None) -> float:
        """Estimate from what is known of one other number of rows."""
        if known is None:
            return self._assume(rows)
        return self._times[known].seconds * self._assume(rows) / self._assume(known)

    def _assume(self, rows: int) -> float:
        return 1 + self._row_share * (rows - 1)

    def knows(self, rows: int) -> bool:
        """Whether a step with `rows` rows was measured, not long ago."""
        return rows in self._known

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step."""
        self._step += 1
        time, is_known = self._times.get(rows), self.knows(rows)
        if time is None:
            time = self._times[rows] = _Time(seconds, 0)
        elif is_known:
            time.seconds += _WEIGHT * (min(seconds, _MAX_GROWTH * time.seconds) - time.seconds)
        else:
            confirmed = seconds > _CONFIRMED * time.seconds
            time.steps = min(2 * time.steps, _MAX_STEPS) if confirmed else _MIN_STEPS
            time.seconds = seconds
        time.until = self._step + time.steps
        if not is_known:
            bisect.insort(self._known, rows)
        self._known = [known for known in self._known if self._times[known].until >= self._step]
