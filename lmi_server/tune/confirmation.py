"""Whether the best setting of a search is better than the configuration as it is, or was lucky in its one run.

The best of many runs is the best partly by chance: of forty settings that are all alike, one comes out several percent
ahead. So the two are measured again in turns, and each run is compared with the run of the other beside it. What
changes slowly, such as the processor's clock or other programs, is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmi_server.bench.paired import PairedRatios
from lmi_server.tune.outcome import Measure, TuneTrial, baseline_of, best_of


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The setting of a trial beside the configuration as it is, in turns.

    pairs: the values (output tokens/s within the limits) of the setting and of the configuration as it is, a pair for
    each turn; None if a run had no value, and then `reasons` says why.
    """

    trial: int
    pairs: Sequence[tuple[float | None, float | None]]
    reasons: Sequence[str] = ()

    @property
    def ratios(self) -> PairedRatios | None:
        """Return the setting's value in each pair, as a multiple of the other one; None if a run had no value."""
        whole = [setting / before for setting, before in self.pairs if setting and before]
        return PairedRatios.from_values(whole) if whole and len(whole) == len(self.pairs) else None

    @property
    def is_better(self) -> bool:
        """Whether the setting is faster even at the lower end of the interval."""
        return self.ratios is not None and self.ratios.interval[0] > 1


def candidate_of(trials: Sequence[TuneTrial]) -> TuneTrial | None:
    """Return the trial to compare with the configuration as it is: the best of the others; None if there is no need.

    It is compared also if the configuration as it is had the highest value, which may be luck as well.
    """
    baseline = baseline_of(trials)
    if baseline is None or baseline.outcome.value is None:
        return None
    return best_of([trial for trial in trials if trial.number >= 0])


def choose(trials: Sequence[TuneTrial], confirmation: Confirmation | None) -> TuneTrial | None:
    """Return the trial to keep: the configuration as it is, unless the best setting was confirmed, if it was measured.

    None if no trial has a value.
    """
    if confirmation is None:
        return best_of(trials)
    number = confirmation.trial if confirmation.is_better else -1
    return next(trial for trial in trials if trial.number == number)


Recall = Callable[[str, Callable[[], Sequence[Any]]], Sequence[Any]]
"""Returns what the function returned for a name, now or in an earlier call of the search (`Search.recall`)."""


def confirm(candidate: TuneTrial, pairs: int, measure: Measure, recall: Recall) -> Confirmation:
    """Measure the setting and the configuration as it is `pairs` times each, in turns.

    The one that comes first changes from pair to pair. `recall` keeps each run, so that a
    stopped search goes on behind the last one.
    """
    found: list[tuple[float | None, float | None]] = []
    reasons: dict[str, None] = {}

    def run(settings: Mapping[str, str], pair: int) -> float | None:
        def judge() -> Sequence[Any]:
            outcome = measure(settings, 0.0)
            return [outcome.value, outcome.reason]

        whose = f"trial {candidate.number}" if settings else f"as it is, beside trial {candidate.number}"
        value: float | None
        reason: str
        value, reason = recall(f"pair {pair}: {whose}", judge)
        if value is None:
            reasons[reason] = None
        return value

    for pair in range(pairs):
        order = (candidate.settings, {}) if pair % 2 else ({}, candidate.settings)
        first, second = (run(settings, pair) for settings in order)
        found.append((first, second) if pair % 2 else (second, first))
    return Confirmation(candidate.number, found, tuple(reasons))
