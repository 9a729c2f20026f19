"""The answers of two versions to the same request, compared as `lmi-server verify` does it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from frontend.canary.answers import read_answer
from frontend.canary.sessions import RequestCounts, SessionCounts
from lmi_server.bench.paired import PairedRatios
from lmi_server.verify.comparison import Pair, compare

_KEPT = 500  # ratios


@dataclass
class Pairs(RequestCounts):
    """How many answers were compared (`requests`), and how many of them are others.

    `refused` of the changed ones were refused by one version alone. Where both answers have log-probabilities, `shifts`
    of them were compared, of the tokens before a change; `shifted` is the sum of their changes in nats. `ties` of the
    changed answers differ first in a token that the old version found as likely as its own.
    """

    changed: int = 0
    refused: int = 0
    ties: int = 0
    shifts: int = 0
    shifted: float = 0.0

    @property
    def mean_shift(self) -> float | None:
        """Return by how many nats a log-probability changed in the mean."""
        return self.shifted / self.shifts if self.shifts else None


def compare_answers(old: bytes, new: bytes) -> Pair:
    """Compare two whole answers. It may take a tenth of a second, and is for a thread."""
    return compare("", read_answer(old), read_answer(new))


class Compared:
    """What was compared, what was `skipped`, and how long the new answers took beside the old ones."""

    def __init__(self) -> None:
        self.skipped = 0
        self.largest_shift = 0.0
        self.ratios: deque[float] = deque(maxlen=_KEPT)
        self._counts = SessionCounts(Pairs)

    @property
    def total(self) -> Pairs:
        return self._counts.total

    def add(self, pair: Pair, ratio: float, session: bytes | None = None) -> None:
        """Add two answers; `ratio` is the new duration as a multiple of the old one."""
        shifts = [abs(shift) for shift in pair.shifts]
        self.largest_shift = max(self.largest_shift, *shifts, 0.0)
        for counts in self._counts.counts_of(session):
            counts.requests += 1
            counts.changed += pair.changed
            counts.ties += pair.is_tie
            counts.shifts += len(shifts)
            counts.shifted += sum(shifts)
        self.ratios.append(ratio)

    def add_refusal(self, session: bytes | None = None) -> None:
        """Note that one version has answered a request, and the other one refused it."""
        for counts in self._counts.counts_of(session):
            counts.requests += 1
            counts.changed += 1
            counts.refused += 1

    def without_most_changed(self) -> Pairs:
        """Return the counts without the session that has most changed answers."""
        return self._counts.without_worst(lambda each: each.changed)

    def without_most_shifted(self) -> Pairs:
        """Return the counts without the session whose log-probabilities changed most."""
        return self._counts.without_worst(lambda each: each.shifted)

    @property
    def latency(self) -> PairedRatios | None:
        return PairedRatios.from_values(self.ratios) if self.ratios else None

    def describe(self) -> dict[str, Any]:
        """Return what the management API says."""
        latency, total = self.latency, self.total
        times = {} if latency is None else {"timesAsLong": latency.median, "interval": list(latency.interval)}
        counts = {"answers": total.requests, "changed": total.changed, "refusedByOne": total.refused}
        logprobs = {} if total.mean_shift is None else {
            "logProbs": {
                "compared": total.shifts, "meanShift": total.mean_shift, "largestShift": self.largest_shift,
                "ties": total.ties,
            }
        }  # fmt: skip
        return {**counts, "skipped": self.skipped, **logprobs, **times}
