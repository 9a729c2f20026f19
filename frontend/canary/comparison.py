"""The answers of two versions to the same request, compared as `lmi-server verify` does it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from frontend.canary.answers import read_answer
from lmi_server.bench.paired import PairedRatios
from lmi_server.verify.comparison import compare

_KEPT = 500  # ratios


@dataclass
class Compared:
    """How many answers were compared, how many of them are others, and how long the new ones took beside the old.

    `refused` of the changed ones were refused by one version alone. Where both answers have log-probabilities, `shifts`
    of them were compared, of the tokens before a change: `mean_shift` and `largest_shift` are in nats. `ties` of the
    changed answers differ first in a token that the old version found as likely as its own.
    """

    answers: int = 0
    changed: int = 0
    refused: int = 0
    skipped: int = 0
    ties: int = 0
    shifts: int = 0
    largest_shift: float = 0.0
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _sum_of_shifts: float = 0.0

    def add(self, old: bytes, new: bytes, ratio: float) -> None:
        """Compare two whole answers; `ratio` is the new duration as a multiple of the old one."""
        pair = compare("", read_answer(old), read_answer(new))
        self.answers += 1
        self.changed += pair.changed
        self.ties += pair.is_tie
        for shift in map(abs, pair.shifts):
            self.shifts += 1
            self._sum_of_shifts += shift
            self.largest_shift = max(self.largest_shift, shift)
        self.ratios.append(ratio)

    def add_refusal(self) -> None:
        """Note that one version has answered a request, and the other one refused it."""
        self.answers += 1
        self.changed += 1
        self.refused += 1

    @property
    def latency(self) -> PairedRatios | None:
        return PairedRatios.from_values(self.ratios) if self.ratios else None

    @property
    def mean_shift(self) -> float | None:
        return self._sum_of_shifts / self.shifts if self.shifts else None

    def describe(self) -> dict[str, Any]:
        """Return what the management API says."""
        latency, mean = self.latency, self.mean_shift
        times = {} if latency is None else {"timesAsLong": latency.median, "interval": list(latency.interval)}
        counts = {"answers": self.answers, "changed": self.changed, "refusedByOne": self.refused}
        logprobs = {} if mean is None else {
            "logProbs": {
                "compared": self.shifts, "meanShift": mean, "largestShift": self.largest_shift, "ties": self.ties
            }
        }  # fmt: skip
        return {**counts, "skipped": self.skipped, **logprobs, **times}
