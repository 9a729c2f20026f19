"""When requests are sent: when earlier ones end (closed loop), or by the clock (open loop)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

BURSTINESS = (0.001, 1e6)
"""From where to where random gaps can be drawn: far below, all are 0 or none; far above, drawing one does not end."""


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests come at `rate` per second, however long the answers take.

    `burstiness` is the shape of the gamma distribution of the gaps, as in vLLM's benchmark: 1 is a Poisson process,
    less comes in bursts, and `inf` is one request every 1/rate seconds. `ramp_to`, if it is given, is the rate at the
    end of `duration_s`.
    """

    rate: float
    burstiness: float = 1.0
    ramp_to: float | None = None
    duration_s: float = 0.0

    def offsets(self, seed: int) -> Iterator[float]:
        """Yield the times of the requests in seconds from the start, without end."""
        numbers = random.Random(seed)
        at = 0.0
        while True:
            yield at
            at += self._gap(numbers) / self._rate(at)

    def _gap(self, numbers: random.Random) -> float:
        if self.burstiness == float("inf"):
            return 1.0
        return numbers.gammavariate(self.burstiness, 1 / self.burstiness)

    def _rate(self, at: float) -> float:
        if self.ramp_to is None or self.duration_s <= 0:
            return self.rate
        share = min(at / self.duration_s, 1.0)
        return self.rate + (self.ramp_to - self.rate) * share


@dataclass(frozen=True, slots=True)
class Replay:
    """Requests come at recorded times, given in seconds from any start; `speed` 2 plays them twice as fast."""

    times: tuple[float, ...]
    speed: float = 1.0

    def offsets(self, seed: int) -> Iterator[float]:
        """Yield the times in seconds from the first one."""
        first = min(self.times, default=0.0)
        return iter(sorted((at - first) / self.speed for at in self.times))


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` clients; each sends its next request when it has its answer."""

    concurrency: int


Arrivals = OpenLoop | Replay | ClosedLoop


def within(offsets: Iterator[float], requests: int | None, duration_s: float | None) -> Iterator[float]:
    """Return the offsets of the first `requests` that come within `duration_s`; None is no limit."""
    if duration_s is not None:
        offsets = itertools.takewhile(lambda at: at < duration_s, offsets)
    return offsets if requests is None else itertools.islice(offsets, requests)
