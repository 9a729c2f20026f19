"""The report of a verification: for people, and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from lmi_server.contract.texts.quoting import excerpt
from lmi_server.verify.comparison import ComparisonSummary, Pair

_SHOWN = 5
_EXCERPT = 60


def lines(summary: ComparisonSummary, noise: ComparisonSummary, pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield the lines of the report. `noise` is of the old version against itself."""
    yield f"prompts      {summary.prompts}"
    if summary.failed_old or summary.failed_new:
        yield f"failed       {summary.failed_old} old, {summary.failed_new} new"
    yield f"changed      {summary.changed} of {summary.compared} answers, {summary.ties} of them at a tie"
    if summary.mean_shift is not None:
        shift = f"{summary.mean_shift:.4f} nats mean change, {summary.largest_shift:.4f} at most"
        yield f"log-prob     {shift}, of the tokens before a change"
    if noise.compared:
        shift = "" if noise.mean_shift is None else f", {noise.mean_shift:.4f} nats mean change"
        yield f"noise        {noise.changed} of {noise.compared} answers{shift}, of old asked again"
    if summary.latency is not None:
        low, high = summary.latency.interval
        yield (
            f"time/token   {summary.latency.median:.3f} times the old one"
            f" ({low:.3f} to {high:.3f}, {summary.latency.confidence:.0%} sure)"
        )
    changed = sorted((pair for pair in pairs if pair.changed), key=_badness, reverse=True)
    for pair in changed[:_SHOWN]:
        yield ""
        yield f'"{excerpt(pair.prompt, _EXCERPT)}"'
        yield f"  token {pair.place}: {_gap(pair)}"
        yield f"  old: {_around(pair.old.text, pair.new.text)}"
        yield f"  new: {_around(pair.new.text, pair.old.text)}"
    if len(changed) > _SHOWN:
        yield f"\n... and {len(changed) - _SHOWN} more; --json has all"
    for pair in [pair for pair in pairs if not pair.is_whole][:_SHOWN]:
        yield f'\n"{excerpt(pair.prompt, _EXCERPT)}": {excerpt(pair.new.error or pair.old.error or "", 200)}'


def as_json(summary: ComparisonSummary, noise: ComparisonSummary, pairs: Sequence[Pair]) -> str:
    """Return all figures and all pairs."""
    rows = [
        {
            "prompt": pair.prompt,
            "old": pair.old.text,
            "new": pair.new.text,
            "changed": pair.changed,
            "place": pair.place,
            "gap": pair.gap,
            "gap_is_more": pair.is_beyond,
            "error": pair.new.error or pair.old.error,
        }
        for pair in pairs
    ]
    return json.dumps({"summary": _figures(summary), "noise": _of_noise(noise), "pairs": rows}, indent=1) + "\n"


def _figures(summary: ComparisonSummary) -> dict[str, Any]:
    figures: dict[str, Any] = dataclasses.asdict(summary)
    if summary.latency is not None:
        low, high = summary.latency.interval
        figures["latency"] = {
            "median": summary.latency.median, "low": low, "high": high, "confidence": summary.latency.confidence
        }  # fmt: skip
    return figures


def _of_noise(noise: ComparisonSummary) -> dict[str, Any]:
    return {name: getattr(noise, name) for name in ("compared", "changed", "mean_shift", "largest_shift")}


def _badness(pair: Pair) -> float:
    return float("inf") if pair.gap is None else pair.gap


def _gap(pair: Pair) -> str:
    if pair.gap is None:
        return "one of the answers ends here"
    return f"the old model preferred its own by {'more than ' if pair.is_beyond else ''}{pair.gap:.3f} nats"


def _around(text: str, other: str) -> str:
    """Return the part of a text from a little before the first difference from the other one on, on one line."""
    same = next(
        (index for index, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other))
    )
    start = max(same - 20, 0)
    return f"{'...' if start else ''}{excerpt(text[start:], _EXCERPT)}"
