"""What a search leaves behind: the serving.properties with the values that it found, and what differs in it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lmi_server.tune.adapter_costs import Cost
from lmi_server.tune.outcome import Trial

_MARK = "# lmi-server tune: "


def tuned_properties(text: str, best: Trial, baseline: Trial | None) -> str:
    """Return a serving.properties with the settings of `best`; each has a comment of where it comes from.

    A key that the file has keeps its place; comments of an earlier search about it are replaced.
    """
    lines = text.splitlines()
    for key, value in best.settings.items():
        comment = f"{_MARK}trial {best.number}, {_figures(best)}{_compared(best, baseline)}"
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


def as_json(
    trials: Sequence[Trial], best: Trial | None, importances: Mapping[str, float], costs: Sequence[Cost]
) -> dict[str, Any]:
    """Return all that was found, for a file."""
    return {
        "best": None if best is None else best.number,
        "importances": dict(importances),
        "adapter_costs": [asdict(cost) for cost in costs],
        "trials": [
            {
                "number": trial.number,
                "settings": dict(trial.settings),
                "output_tokens_per_s": trial.outcome.value,
                "concurrency": trial.outcome.concurrency,
                "reason": trial.outcome.reason,
                "is_pruned": trial.outcome.is_pruned,
                "load_s": trial.outcome.load_s,
                "figures": dict(trial.outcome.figures),
            }
            for trial in trials
        ],
    }


def _figures(trial: Trial) -> str:
    figures = trial.outcome.figures
    tokens, seconds = trial.outcome.value or 0.0, figures["e2el_ms"]["p99"] / 1000
    return f"{tokens:.1f} output tokens/s at {trial.outcome.concurrency} requests, p99 end to end {seconds:.2f} s"


def _compared(best: Trial, baseline: Trial | None) -> str:
    before = None if baseline is None else baseline.outcome.value
    return "" if before is None else f" (before: {before:.1f} output tokens/s)"


def _is_entry(line: str, key: str) -> bool:
    return re.match(rf"\s*{re.escape(key)}\s*[=:\s]", f"{line} ") is not None
