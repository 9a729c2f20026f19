"""When a new version is promoted, and when it is taken back. Plain data: no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from frontend.canary.comparison import Compared
from frontend.canary.figures import Figures
from frontend.canary.proportions import chance_of_more

_EARLY = 5  # errors of the new version that are no accident
_CHANCE = 1e-4  # that a difference of shares is an accident; small, because a trial is looked at again and again


@dataclass(frozen=True, slots=True)
class Rules:
    """What the new version must keep to.

    It is judged after `requests` requests, which must have come within `duration_s`; what was refused does not count.
    Its share of errors may be higher by `max_errors` (1 is all requests), its median latency `max_slower` times as
    long, and of the answers to copies of requests the share `max_changed` may be others. The
    log-probabilities of their tokens may differ by `max_shift` nats in the mean. And it may not refuse significantly
    more requests than the old version.
    """

    requests: int
    duration_s: float
    max_errors: float
    max_slower: float
    max_changed: float
    max_shift: float

    def objection(self, old: Figures, new: Figures, copies: Compared | None) -> str | None:
        """Return why the new version is not good enough, by what is known; None if nothing speaks against it."""
        objection = _objection_to_refusals(old, new) or self._objection_to_errors(old, new)
        if objection is not None:
            return objection
        if copies is not None:
            return self._objection_to_copies(copies)
        return self._objection_to_latency(old, new)

    def early_objection(self, old: Figures, new: Figures) -> str | None:
        """Return why the new version is to be taken back before its time: it fails, or refuses, often."""
        failures = self._objection_to_errors(old, new) if new.errors >= _EARLY else None
        return failures or _objection_to_refusals(old, new)

    def finding(self, old: Figures, new: Figures) -> str | None:
        """Return a change that may be unintended, although it does not speak against the new version."""
        if chance_of_more(new.refused, new.requests, old.refused, old.requests) >= _CHANCE:
            return None
        return f"it refuses fewer requests: {_refusals(old, new)}"

    def _objection_to_errors(self, old: Figures, new: Figures) -> str | None:
        if new.error_rate <= old.error_rate + self.max_errors:
            return None
        return f"{new.errors} of {new.judging} requests failed, and {old.errors} of {old.judging} of the old version"

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
            refused = f", {copies.refused} of them refused by one version" if copies.refused else ""
            return f"{copies.changed} of {copies.answers} answers are others{refused}"
        shift = copies.mean_shift
        if shift is not None and shift > self.max_shift:
            return f"the log-probabilities of {copies.shifts} tokens differ by {shift:.4f} nats in the mean"
        ratios = copies.latency
        if ratios is not None and ratios.interval[0] > self.max_slower:
            return f"a copy takes {ratios.interval[0]:.2f} times as long at least"
        return None


def _objection_to_refusals(old: Figures, new: Figures) -> str | None:
    if chance_of_more(old.refused, old.requests, new.refused, new.requests) >= _CHANCE:
        return None
    return f"it refuses more requests: {_refusals(old, new)}"


def _refusals(old: Figures, new: Figures) -> str:
    return f"{new.refused} of {new.requests}, and the old version {old.refused} of {old.requests}"
