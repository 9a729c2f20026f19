"""The search: optuna proposes settings, a measurement judges them, and SQLite keeps what was found."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState

from lmi_server.contract.errors import ConfigurationError
from lmi_server.processes.model_imports import hide
from lmi_server.tune.outcome import Measure, Outcome, TuneTrial, best_of
from lmi_server.tune.space import Choices, Range, Space, grid, size_of, text_of

_BASELINE = "baseline"
_OUTCOME = "outcome"
_MAX_REPEATS = 200  # proposals of settings that are known already, one after the other


class Search:
    """A search that can be stopped at any time, and goes on where it was.

    A study of the same model, space and load in the same file is the same search. A trial that was running when the
    process was killed is tried again.
    """

    def __init__(self, path: Path, what: Mapping[str, Any], space: Space, seed: int, is_grid: bool) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._path = path
        digest = hashlib.sha256(json.dumps([what, _describe(space), is_grid], sort_keys=True).encode()).hexdigest()
        self._distributions = {key: _distribution(values) for key, values in space.items()}
        self._study = optuna.create_study(
            storage=f"sqlite:///{path}",
            study_name=f"tune-{digest[:12]}",
            sampler=optuna.samplers.TPESampler(seed=seed),
            direction="maximize",
            load_if_exists=True,
        )
        self._size = size_of(space)
        self._is_grid = is_grid
        with _full_disk_explained(path):
            self._try_again()
            if is_grid:
                for combination in grid(space):
                    self._study.enqueue_trial(combination, skip_if_exists=True)

    @property
    def trials(self) -> list[TuneTrial]:
        """Return the trials that have ended, the configuration as it is first. No two have the same settings."""
        ended = [trial for trial in self._study.trials if trial.state.is_finished() and _OUTCOME in trial.user_attrs]
        baseline = self._study.user_attrs.get(_BASELINE)
        found = [] if baseline is None else [TuneTrial(-1, {}, Outcome(**baseline))]
        for each in ended:
            settings = {key: text_of(value) for key, value in each.params.items()}
            if all(trial.settings != settings for trial in found):
                found.append(TuneTrial(each.number, settings, Outcome(**each.user_attrs[_OUTCOME])))
        return found

    @property
    def importances(self) -> dict[str, float]:
        """Return how much of the differences in throughput each option explains; empty before that can be told.

        Trials that were given up count with the throughput of their short run: an option that is wrong in all of them
        would seem to make no difference otherwise.
        """
        with hide("sklearn"):  # another evaluator needs it: 1.2 s of a processor (benchmarks.command_starts)
            from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

        judged = optuna.create_study(direction="maximize")  # in memory
        kept = self._study.trials
        for trial in self.trials:
            if trial.number >= 0:
                tried, value = kept[trial.number], trial.outcome.value or 0.0
                judged.add_trial(
                    optuna.trial.create_trial(params=tried.params, distributions=tried.distributions, value=value)
                )
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*importances will be equal", UserWarning)  # that is, not known
            try:
                # The default evaluator fits random forests and needs scikit-learn. This one asks which options tell the
                # better half of the trials from all; the best tenth, its default, is a few trials here, and chance.
                evaluator = PedAnovaImportanceEvaluator(target_quantile=0.5, evaluate_on_local=False)
                return dict(get_param_importances(judged, evaluator=evaluator))
            except (RuntimeError, ValueError, UserWarning):  # too few trials, or all of them alike
                return {}

    def run(self, trials: int, measure: Measure) -> Iterator[TuneTrial]:
        """Try settings until there are `trials` (with earlier calls) or no further ones; yield each new trial.

        A grid is tried to its end. Raises ConfigurationError if a trial cannot be kept, as on a full disk.
        """
        with _full_disk_explained(self._path):
            yield from self._run(trials, measure)

    def _run(self, trials: int, measure: Measure) -> Iterator[TuneTrial]:
        found = self.trials
        if not any(trial.number < 0 for trial in found):
            found.append(TuneTrial(-1, {}, measure({}, 0.0)))
            self._study.set_user_attr(_BASELINE, asdict(found[-1].outcome))
            yield found[-1]
        wanted = min(sys.maxsize if self._is_grid else trials, self._size or sys.maxsize)
        repeats = 0
        while len(found) - 1 < wanted and repeats < _MAX_REPEATS:
            proposed = self._study.ask(self._distributions)
            settings = {key: text_of(value) for key, value in proposed.params.items()}
            # Optuna proposes some settings again; it is told what they gave.
            known = next((trial for trial in found if trial.settings == settings), None)
            best = best_of(found)
            outcome = known.outcome if known else measure(settings, best.outcome.value or 0.0 if best else 0.0)
            proposed.set_user_attr(_OUTCOME, asdict(outcome))
            self._tell(proposed, outcome)
            repeats = repeats + 1 if known else 0
            if known is None:
                found.append(TuneTrial(proposed.number, settings, outcome))
                yield found[-1]

    def recall(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returned for this name, now or in an earlier call of the search; values of JSON.

        Raises ConfigurationError if it cannot be kept, as on a full disk.
        """
        if name not in self._study.user_attrs:
            made = make()
            with _full_disk_explained(self._path):
                self._study.set_user_attr(name, made)
        return self._study.user_attrs[name]

    def _tell(self, trial: optuna.Trial, outcome: Outcome) -> None:
        if outcome.value is None:
            # A setting that does not load is the worst there is. Optuna would learn nothing from a failed trial.
            self._study.tell(trial, 0.0)
        elif outcome.is_pruned:
            trial.report(outcome.value, 0)
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, outcome.value)

    def _try_again(self) -> None:
        for trial in self._study.get_trials(states=[TrialState.RUNNING]):
            self._study.tell(trial.number, state=TrialState.FAIL)
            self._study.enqueue_trial(trial.params)


@contextlib.contextmanager
def _full_disk_explained(path: Path) -> Iterator[None]:
    """Raise ConfigurationError in place of the error of a file that cannot be written, as on a full disk."""
    try:
        yield
    except StorageInternalError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ConfigurationError(
            f"--study {path} cannot be written: {reason}; the trials before are kept. Free space on its disk, and the "
            "same command goes on"
        ) from error


def _distribution(values: Choices | Range) -> BaseDistribution:
    if isinstance(values, Choices):
        return CategoricalDistribution(values.values)
    if values.is_whole:
        return IntDistribution(int(values.low), int(values.high), step=int(values.step or 1))
    return FloatDistribution(values.low, values.high, step=values.step)


def _describe(space: Space) -> dict[str, Any]:
    return {key: asdict(values) for key, values in space.items()}
