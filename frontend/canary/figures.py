"""How the requests of one version of a model ended, and how long they took."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from frontend.canary.outcomes import Outcome
from lmi_server.bench.paired import PairedRatios

_KEPT = 500  # latencies


@dataclass
class Figures:
    """Counts and latencies. `seconds` are the latest seconds per output token, or per answer without a text.

    `requests` that were `refused` to their clients say nothing of a version; the others judge it.
    """

    requests: int = 0
    errors: int = 0
    refused: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def add(self, outcome: Outcome, seconds: float) -> None:
        """Count a request that has ended; only answers have a latency."""
        self.requests += 1
        self.errors += outcome is Outcome.ERROR
        self.refused += outcome is Outcome.REFUSED
        if outcome is Outcome.SUCCESS:
            self.seconds.append(seconds)

    @property
    def judging(self) -> int:
        """Return how many requests say something of the version."""
        return self.requests - self.refused

    @property
    def error_rate(self) -> float:
        return self.errors / self.judging if self.judging else 0.0

    @property
    def latency(self) -> PairedRatios | None:
        """Return the latencies with an interval of their median; None without any."""
        return PairedRatios.from_values(self.seconds) if self.seconds else None

    def describe(self) -> dict[str, Any]:
        """Return what the management API says."""
        latency = self.latency
        median = {} if latency is None else {"medianMs": latency.median * 1000}
        interval = {} if latency is None else {"intervalMs": [bound * 1000 for bound in latency.interval]}
        return {"requests": self.requests, "errors": self.errors, "refused": self.refused, **median, **interval}
