"""When a new version is promoted, and when it is taken back. Plain data: no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, lgamma

from frontend.canary.comparison import Compared, Pairs
from frontend.canary.figures import Endings, Figures

_EARLY = 5  # errors of the new version that are no accident
_CHANCE = 1e-4  # that a difference of shares is an accident; small, because a trial is looked at again and again
_NEGLIGIBLE = 1e-9  # of the sum, below which no further term counts


@dataclass(frozen=True, slots=True)
class Rules:
    """What the new version must keep to.

    It is judged after `requests` requests, which must have come within `duration_s`; what was refused does not count.
    Its share of errors may be higher by `max_errors` (1 is all requests), its median latency `max_slower` times as
    long, and of the answers to copies of requests the share `max_changed` may be others. The
    log-probabilities of their tokens may differ by `max_shift` nats in the mean. And it may not refuse significantly
    more requests than the old version.

    The share `max_client` of `requests` may be of one session, for either version. What the session that weighs most
    says against the new version is a doubt, and no objection.
    """

    requests: int
    duration_s: float
    max_errors: float
    max_slower: float
    max_changed: float
    max_shift: float
    max_client: float

    @property
    def max_of_client(self) -> int:
        return max(1, int(self.requests * self.max_client))

    def objection(self, old: Figures, new: Figures, copies: Compared | None) -> str | None:
        """Return why the new version is not good enough, by what is known; None if nothing speaks against it."""
        objection = _objection_to_refusals(old.without_most_refusals(), new.without_most_refusals())
        objection = objection or self._objection_to_errors(old.without_most_errors(), new.without_most_errors())
        if objection is not None:
            return objection
        if copies is None:
            return self._objection_to_latency(old, new)
        objection = self._objection_to_changes(copies.without_most_changed())
        return objection or self._objection_to_shifts(copies.without_most_shifted()) or self._objection_to_times(copies)

    def doubt(self, old: Figures, new: Figures, copies: Compared | None) -> str | None:
        """Return what speaks against the new version if one session is taken at its word; None without doubt."""
        doubt = self._objection_to_errors(old.total, new.total)
        if doubt is not None or copies is None:
            return doubt
        return self._objection_to_changes(copies.total) or self._objection_to_shifts(copies.total)

    def early_objection(self, old: Figures, new: Figures) -> str | None:
        """Return why the new version is to be taken back before its time: it fails, or refuses, often."""
        before, after = old.without_most_errors(), new.without_most_errors()
        failures = self._objection_to_errors(before, after) if after.errors >= _EARLY else None
        return failures or _objection_to_refusals(old.without_most_refusals(), new.without_most_refusals())

    def finding(self, old: Figures, new: Figures) -> str | None:
        """Return a change that may be unintended, although it does not speak against the new version."""
        before, after = old.total, new.total
        if _objection_to_refusals(before, after) is not None:
            return f"one session is refused more often: {_refusals(before, after)}"
        if chance_of_more(after.refused, after.requests, before.refused, before.requests) >= _CHANCE:
            return None
        return f"it refuses fewer requests: {_refusals(before, after)}"

    def _objection_to_errors(self, old: Endings, new: Endings) -> str | None:
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

    def _objection_to_changes(self, pairs: Pairs) -> str | None:
        if not pairs.requests or pairs.changed <= self.max_changed * pairs.requests:
            return None
        refused = f", {pairs.refused} of them refused by one version" if pairs.refused else ""
        return f"{pairs.changed} of {pairs.requests} answers are others{refused}"

    def _objection_to_shifts(self, pairs: Pairs) -> str | None:
        shift = pairs.mean_shift
        if shift is None or shift <= self.max_shift:
            return None
        return f"the log-probabilities of {pairs.shifts} tokens differ by {shift:.4f} nats in the mean"

    def _objection_to_times(self, copies: Compared) -> str | None:
        ratios = copies.latency
        if ratios is None or ratios.interval[0] <= self.max_slower:
            return None
        return f"a copy takes {ratios.interval[0]:.2f} times as long at least"


def _objection_to_refusals(old: Endings, new: Endings) -> str | None:
    if chance_of_more(old.refused, old.requests, new.refused, new.requests) >= _CHANCE:
        return None
    return f"it refuses more requests: {_refusals(old, new)}"


def _refusals(old: Endings, new: Endings) -> str:
    return f"{new.refused} of {new.requests}, and the old version {old.refused} of {old.requests}"


def chance_of_more(few: int, of_few: int, many: int, of_many: int) -> float:
    """Return the probability of `many` or more of `of_many`, beside `few` of `of_few`, if the true shares are equal.

    It is 1 unless the share of `many` is the larger one. This is Fisher's exact test of a table of two rows, one-sided:
    R. A. Fisher, "On the interpretation of chi-squared from contingency tables", 1922. It is right for small counts.
    """
    if not of_few or not of_many or many * of_few <= few * of_many:
        return 1.0
    total, marked = of_few + of_many, few + many
    term = exp(_ways(marked, many) + _ways(total - marked, of_many - many) - _ways(total, of_many))
    found = 0.0
    for count in range(many, min(of_many, marked) + 1):  # terms fall from here on: `many` is above the mean
        found += term
        if term <= _NEGLIGIBLE * found:
            break
        term *= (marked - count) * (of_many - count) / ((count + 1) * (total - marked - of_many + count + 1))
    return min(found, 1.0)


def _ways(count: int, chosen: int) -> float:
    """Return the logarithm of the binomial coefficient."""
    return lgamma(count + 1) - lgamma(chosen + 1) - lgamma(count - chosen + 1)
