"""When a new version is promoted, and when it is taken back. Plain data: no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from frontend.canary.comparison import Compared
from frontend.canary.figures import Figures

_EARLY = 5  # errors of the new version that are no accident


@dataclass(frozen=True, slots=True)
class Rules:
    """What the new version must keep to.

    It is judged after `requests` requests, which must have come within `duration_s`. Its share of errors may be higher
    by `max_errors` (1 is all requests), its median latency `max_slower` times as long, and of the answers to copies of
    requests the share `max_changed` may be others.
    """

    requests: int
    duration_s: float
    max_errors: float
    max_slower: float
    max_changed: float

    def objection(self, old: Figures, new: Figures, copies: Compared | None) -> str | None:
        """Return why the new version is not good enough, by what is known; None if nothing speaks against it."""
        if new.error_rate > old.error_rate + self.max_errors:
            return (
                f"{new.errors} of {new.requests} requests failed, and {old.errors} of {old.requests} of the old version"
            )
        if copies is not None:
            return self._objection_to_copies(copies)
        return self._objection_to_latency(old, new)

    def early_objection(self, old: Figures, new: Figures) -> str | None:
        """Return why the new version is to be taken back before its time: it fails often."""
        return self.objection(old, new, Compared()) if new.errors >= _EARLY else None

    def _objection_to_latency(self, old: Figures, new: Figures) -> str | None:
        before, after = old.latency, new.latency
        if before is None or after is None:
            return None
        low, high = after.interval[0], before.interval[1]
        if low <= self.max_slower * high:
            return None
        return (
            f"the median latency is {after.median * 1000:.1f} ms, and {before.median * 1000:.1f} ms of the old version"
        )

    def _objection_to_copies(self, copies: Compared) -> str | None:
        if copies.answers and copies.changed > self.max_changed * copies.answers:
            return f"{copies.changed} of {copies.answers} answers are others"
        ratios = copies.latency
        if ratios is not None and ratios.interval[0] > self.max_slower:
            return f"a copy takes {ratios.interval[0]:.2f} times as long at least"
        return None
