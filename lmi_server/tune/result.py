"""What a search leaves behind: the serving.properties with the best values, and the difference to the one before."""

from __future__ import annotations

import difflib
import re
from dataclasses import asdict
from typing import Any

from lmi_server.tune.confirmation import Confirmation
from lmi_server.tune.outcome import GOODPUT, THROUGHPUT, TuneTrial
from lmi_server.tune.report import SearchResult

_MARK = "# lmi-server tune: "
_NAMES = {THROUGHPUT: "output_tokens_per_s", GOODPUT: "goodput_per_s"}


def tuned_properties(
    text: str, best: TuneTrial, baseline: TuneTrial | None, confirmation: Confirmation | None = None
) -> str:
    """Return a serving.properties with the settings of `best`; each has a comment of where it comes from.

    A key that the file has keeps its place; comments of an earlier search about it are replaced.
    """
    lines = text.splitlines()
    for key, value in best.settings.items():
        comment = f"{_MARK}trial {best.number}, {_figures(best)}{_compare(baseline, confirmation)}"
        place = next((number for number, line in enumerate(lines) if _is_entry(line, key)), None)
        if place is None:
            lines += [comment, f"{key}={value}"]
            continue
        has_mark = place > 0 and lines[place - 1].startswith(_MARK)
        lines[place - has_mark : place + 1] = [comment, f"{key}={value}"]
    return "\n".join(lines) + "\n"


def difference(before: str, after: str, name: str) -> str:
    """Return the unified diff of two versions of a file."""
    return "".join(
        difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), name, f"{name} (tuned)")
    )


def as_json(result: SearchResult) -> dict[str, Any]:
    """Return the whole result, for a file."""
    return {
        "best": None if result.best is None else result.best.number,
        "confirmation": None if result.confirmation is None else _confirmation(result.confirmation, result.unit),
        "importances": dict(result.importances),
        "adapter_costs": [asdict(cost) for cost in result.costs],
        "trials": [
            {
                "number": trial.number,
                "settings": dict(trial.settings),
                _NAMES[trial.outcome.unit]: trial.outcome.value,
                "concurrency": trial.outcome.concurrency,
                "reason": trial.outcome.reason,
                "is_pruned": trial.outcome.is_pruned,
                "load_s": trial.outcome.load_s,
                "figures": dict(trial.outcome.figures),
            }
            for trial in result.trials
        ],
    }


def _confirmation(confirmation: Confirmation, unit: str) -> dict[str, Any]:
    ratios = confirmation.ratios
    return {
        "trial": confirmation.trial,
        _NAMES[unit]: [list(pair) for pair in confirmation.pairs],
        "ratio": None if ratios is None else ratios.median,
        "interval": None if ratios is None else ratios.interval,
        "confidence": None if ratios is None else ratios.confidence,
        "is_better": confirmation.is_better,
        "reasons": list(confirmation.reasons),
    }


def _figures(trial: TuneTrial) -> str:
    figures = trial.outcome.figures
    value, seconds = trial.outcome.value or 0.0, figures["e2el_ms"]["p99"] / 1000
    return f"{value:.1f} {trial.outcome.unit} at {trial.outcome.concurrency} requests, p99 end to end {seconds:.2f} s"


def _compare(baseline: TuneTrial | None, confirmation: Confirmation | None) -> str:
    before = None if baseline is None else baseline.outcome.value
    if baseline is None or before is None:
        return ""
    ratios = None if confirmation is None else confirmation.ratios
    times = "" if ratios is None else f"; {ratios.median:.2f} times that in {len(ratios.values)} pairs"
    return f" (before: {before:.1f} {baseline.outcome.unit}{times})"


def _is_entry(line: str, key: str) -> bool:
    return re.match(rf"\s*{re.escape(key)}\s*[=:\s]", f"{line} ") is not None
