"""The report of a search: the changes, the Pareto front, the explanation of the differences, and the next
measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lmi_server.bench.reports.page import Plot, Section, Table, scatter
from lmi_server.tune.adapter_costs import Cost
from lmi_server.tune.confirmation import Confirmation, choose
from lmi_server.tune.outcome import THROUGHPUT, TuneTrial, baseline_of, pareto
from lmi_server.tune.space import Choices, Range, Space

_UNIMPORTANT = 0.05
_TRIALS_PER_OPTION = 5
_NOISE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """All that a report is made of; `after` is the new serving.properties, and `difference` what differs in it."""

    trials: Sequence[TuneTrial]
    space: Space
    importances: Mapping[str, float]
    confirmation: Confirmation | None = None
    costs: Sequence[Cost] = ()
    concurrency: int = 0
    has_data: bool = False
    unused_adapters: Sequence[str] = ()
    after: str = ""
    difference: str = ""

    @property
    def best(self) -> TuneTrial | None:
        """Return the trial to keep; None if no setting keeps the limits."""
        return choose(self.trials, self.confirmation)

    @property
    def unit(self) -> str:
        """Return the unit of the values of all trials."""
        return next((trial.outcome.unit for trial in self.trials if trial.outcome.value is not None), THROUGHPUT)

    @property
    def baseline(self) -> TuneTrial | None:
        return baseline_of(self.trials)


def sections(result: SearchResult) -> list[Section]:
    """Return the parts of the report."""
    front = pareto(result.trials, "e2el_ms")
    parts = [
        Section("Result", _result(result)),
        Section(
            "What to change", code=result.difference or "Nothing: no setting is better than the one that is there."
        ),
        Section(
            "Throughput and latency",
            _FRONT_TEXT,
            [_table("Pareto front", front, result.unit)],
            [_front_plot(result, front)],
        ),
        Section("Importance", tables=[_importance(result.importances)]),
        Section("What to measure next", next_steps(result) or ["Nothing stands out."]),
        Section("All trials", tables=[_table("", result.trials, result.unit)]),
    ]
    if result.costs:
        parts.insert(3, Section("What adapters cost", _COST_TEXT, [cost_table(result.costs)]))
    return parts


_FRONT_TEXT = ["No other setting is both faster than one of the front and better in its p99 end to end."]
_COST_TEXT = [
    "Prefill and decode are those of requests that come one at a time: the median time to the first token, and of each "
    "further one. The percentages compare with the model without an adapter."
]


def _result(result: SearchResult) -> list[str]:
    best, baseline = result.best, result.baseline
    if best is None or best.outcome.value is None:
        return ["No setting keeps the limits; the table of all trials says why."]
    text = f"The best of {len(result.trials)} settings gives {best.outcome.value:.1f} {result.unit}: {_name(best)}."
    before = None if baseline is None else baseline.outcome.value
    if not before:
        return [text, "The configuration as it is gives none within the limits."]
    if result.confirmation is not None:
        return [text, confirmation_text(result)] if best.settings else [confirmation_text(result)]
    return [text, f"That is {best.outcome.value / before:.2f} times the {before:.1f} of the configuration as it is."]


def confirmation_text(result: SearchResult) -> str:
    """Return what the runs in turns say of the best setting and the configuration as it is."""
    confirmation = result.confirmation
    assert confirmation is not None
    name = _name(next(trial for trial in result.trials if trial.number == confirmation.trial))
    pairs = f"{len(confirmation.pairs)} pairs of runs in turns"
    if confirmation.ratios is None:
        reasons = "; ".join(confirmation.reasons)
        return f"In {pairs}, {name} or the configuration as it is gave nothing once: {reasons}. Nothing is to change."
    low, high = confirmation.ratios.interval
    text = (
        f"In {pairs}, {name} gives {confirmation.ratios.median:.3f} times the throughput of the configuration as it is"
        f" ({low:.3f} to {high:.3f}, {confirmation.ratios.confidence:.0%} sure)"
    )
    if confirmation.is_better:
        return f"{text}."
    return f"{text}: that may be chance, and the configuration as it is stays."


def _table(title: str, trials: Sequence[TuneTrial], unit: str) -> Table:
    rows = []
    for trial in trials:
        outcome = trial.outcome
        value = "" if outcome.value is None else f"{outcome.value:.1f}"
        p99s = [_p99(trial, latency) for latency in ("e2el_ms", "ttft_ms", "itl_ms")]
        cells = [value, str(outcome.concurrency or ""), *p99s, outcome.reason]
        rows.append([_name(trial), *cells])
    columns = ("settings", unit, "requests", "p99 end to end, ms", "p99 TTFT, ms", "p99 ITL, ms", "")
    return Table(title, columns, rows)


def _name(trial: TuneTrial) -> str:
    return ", ".join(f"{key.removeprefix('option.')}={value}" for key, value in trial.settings.items()) or "as it is"


def _p99(trial: TuneTrial, latency: str) -> str:
    value = trial.outcome.figures.get(latency, {}).get("p99")
    return "" if value is None else f"{value:.0f}"


def _front_plot(result: SearchResult, front: Sequence[TuneTrial]) -> Plot:
    on_front = {trial.number for trial in front}
    groups: dict[str, list[tuple[float, float]]] = {"other settings": [], "front": [], "as it is": []}
    for trial in result.trials:
        p99 = trial.outcome.figures.get("e2el_ms", {}).get("p99")
        if trial.outcome.value is not None and p99 is not None:
            group = "as it is" if trial.number < 0 else "front" if trial.number in on_front else "other settings"
            groups[group].append((trial.outcome.value, p99))
    points = scatter(groups)
    return Plot("p99 end to end, by throughput", result.unit, "ms", points.x, points.series, "points")


def _importance(importances: Mapping[str, float]) -> Table:
    rows = [[key, f"{value:.0%}"] for key, value in importances.items()]
    return Table(
        "", ("option", "of the differences in throughput"), rows or [["not known: too few different trials", ""]]
    )


def cost_table(costs: Sequence[Cost]) -> Table:
    """Return what each traffic costs, compared with the first one."""
    columns = (
        *("traffic", "prefill, ms", "decode, ms per token", "decode under load, ms", "output tokens/s"),
        *("p99 end to end, ms", "adapter added in, s", ""),
    )
    base = costs[0]
    rows = [
        [
            cost.traffic,
            _compare(cost.prefill_ms, base.prefill_ms),
            _compare(cost.decode_ms, base.decode_ms),
            _compare(cost.loaded_decode_ms, base.loaded_decode_ms),
            _compare(cost.output_tokens_per_s, base.output_tokens_per_s),
            _compare(cost.p99_e2el_ms, base.p99_e2el_ms),
            "" if cost.load_s is None else f"{cost.load_s:.2f}",
            cost.reason,
        ]
        for cost in costs
    ]
    return Table("", columns, rows)


def _compare(value: float | None, base: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if value == base or not base else f"{value:.1f} ({value / base - 1:+.0%})"


# --- what to measure next ---


def next_steps(result: SearchResult) -> list[str]:
    """Return what a next search would tell more about."""
    return [*_of_best(result), *_of_options(result), *_of_traffic(result)]


def _of_best(result: SearchResult) -> Iterator[str]:
    best, baseline = result.best, result.baseline
    if best is None:
        yield "No setting keeps the limits: raise them, or send fewer requests at a time by --concurrency."
        return
    for key, value in best.settings.items():
        if (edge := _edge(result.space[key], value)) is not None:
            yield f"The best {key}, {value}, is the {edge[0]} that was tried: try {edge[1]} ones."
    if best.outcome.concurrency < result.concurrency:
        yield (
            f"The limits hold at {best.outcome.concurrency} requests at a time, not at {result.concurrency}: "
            f"search with --concurrency {best.outcome.concurrency} too."
        )
    before = baseline.outcome.value if baseline else None
    confirmation = result.confirmation
    if confirmation is not None:
        if _is_open(confirmation):
            yield "The runs in turns do not tell which is better: use more --requests, or more pairs (--confirm)."
    elif before and best.settings and (best.outcome.value or 0) < (1 + _NOISE) * before:
        yield "The best is within 3 % of the configuration as it is, which may be chance: use more --requests."


def _is_open(confirmation: Confirmation) -> bool:
    """Whether the best setting may be more than a few percent better, and may be no better."""
    ratios = confirmation.ratios
    return ratios is None or ratios.interval[0] <= 1 < 1 + _NOISE < ratios.interval[1]


def _edge(values: Choices | Range, value: str) -> tuple[str, str] | None:
    """Return whether a number is the lowest or highest one that was tried, and where others would be."""
    try:
        bounds = (values.low, values.high) if isinstance(values, Range) else sorted(map(float, values.values))
        edges = {bounds[0]: ("lowest", "lower"), bounds[-1]: ("highest", "higher")}
    except ValueError:  # words
        return None
    return edges.get(float(value)) if len(edges) > 1 else None


def _of_options(result: SearchResult) -> Iterator[str]:
    for key, importance in result.importances.items():
        if importance < _UNIMPORTANT:
            yield f"{key} explains {importance:.0%} of the differences: leave it out in favour of the others."
    wanted = _TRIALS_PER_OPTION * len(result.space)
    if len(result.trials) < wanted:
        tried = f"{len(result.trials)} settings are few for {len(result.space)} options"
        yield f"{tried}: --trials {wanted} goes on with this search."


def _of_traffic(result: SearchResult) -> Iterator[str]:
    if result.unused_adapters:
        names = ", ".join(result.unused_adapters)
        yield f"The model has adapters that were not in the traffic ({names}): search with --adapters."
    if not result.has_data:
        yield "The prompts were random: recorded ones (--data) show what the prefix cache and real lengths do."
