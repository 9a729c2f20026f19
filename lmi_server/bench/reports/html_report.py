"""The report of a benchmark as a page: figures, latency over throughput, quantiles, and what happened when."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmi_server.bench.observation import Measured, cores
from lmi_server.bench.records import Record, quantile
from lmi_server.bench.reports.page import Plot, Points, Section, Table, Values, page, scatter
from lmi_server.bench.reports.terminal_report import TITLES, rows
from lmi_server.bench.server_metrics import waiting

_PERCENTS = [*map(float, range(100)), 99.5, 99.9, 100.0]
_MIB = 2**20
_MAX_POINTS = 4000  # of requests in one plot
_OF_REQUEST: Mapping[str, Callable[[Record], Sequence[float]]] = {
    "ttft": lambda record: () if record.ttft is None else (record.ttft,),
    "tpot": lambda record: () if record.tpot is None else (record.tpot,),
    "itl": lambda record: record.gaps,
    "e2el": lambda record: (record.e2el,),
}
_MAX_STEPS = 240
_STEPS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)


def html_report(
    settings: Mapping[str, Any], summaries: Mapping[str, Mapping[str, Any]], runs: Mapping[str, Measured]
) -> str:
    """Return the page of a benchmark; keys are the titles of its runs."""
    asked = [(name, str(value)) for name, value in settings.items() if value not in (None, "")]
    sections = [
        Section("What was asked", tables=[Table("", ("", ""), asked)]),
        Section("Figures", tables=[Table("Latencies in milliseconds", ("", *summaries), rows(summaries))]),
        Section("Throughput and latency", _note(summaries), plots=_curves(summaries)),
        Section("Quantiles", plots=_quantiles({title: run.records for title, run in runs.items()})),
        *(Section(title, plots=[*_over_time(run.records), *_of_server(run)]) for title, run in runs.items()),
    ]
    return page(f"Benchmark of {settings['url']}", sections)


def _note(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if len(summaries) > 1:
        return ["Each run is a point, from the lowest throughput to the highest."]
    return ["One run is one point. Several, such as --concurrency 1,8,32, show where latency begins to grow."]


def _curves(summaries: Mapping[str, Mapping[str, Any]]) -> list[Plot]:
    """Return each latency over the throughput."""
    found = sorted(summaries.values(), key=lambda figures: float(figures["output_tokens_per_s"]))
    plots = []
    for name, title in TITLES.items():
        measured = [figures for figures in found if figures[f"{name}_ms"]]
        if measured:
            x = [figures["output_tokens_per_s"] for figures in measured]
            series = [(each, [figures[f"{name}_ms"][each] for figures in measured]) for each in ("median", "p99")]
            plots.append(Plot(f"{title}, by throughput", "output tokens/s", "ms", x, series, "both"))
    return plots


def _quantiles(runs: Mapping[str, Sequence[Record]]) -> list[Plot]:
    plots = []
    for name, title in TITLES.items():
        series = [(run, values) for run, records in runs.items() if (values := _percents(records, _OF_REQUEST[name]))]
        if series:
            plots.append(Plot(title, "% of the values are at most", "ms", _PERCENTS, series))
    return plots


def _percents(records: Sequence[Record], values: Callable[[Record], Sequence[float]]) -> list[float]:
    ordered = sorted(value * 1000 for record in records if record.is_good for value in values(record))
    return [quantile(ordered, percent / 100) for percent in _PERCENTS] if ordered else []


def _over_time(records: Sequence[Record]) -> list[Plot]:
    found = timeline(records)
    time_s = "seconds from the start"
    points = _points(records)
    ended = [("ended", found.ended_per_s), ("failed", found.failed_per_s)]
    return [
        Plot("Requests in flight", time_s, "requests", found.times, [("in flight", found.in_flight)]),
        Plot("Requests per second", time_s, "requests/s", found.times, ended),
        Plot("Output tokens per second", time_s, "tokens/s", found.times, [("tokens", found.tokens_per_s)]),
        Plot("Latency of each request, by when it was due", time_s, "ms", points.x, points.series, "points"),
    ]


def _of_server(run: Measured) -> list[Plot]:
    """Return what the server said of itself, and used, during the run; without what it did not say."""
    start, seen = start_of(run.records), run.seen
    x = [each.at - start for each in seen]
    readings = [each.reading for each in seen]
    shares: list[tuple[str, Values]] = [("KV cache", _percent([reading.get("kv_usage") for reading in readings]))]
    shares.append(("GPU", _percent([each.gpu.load if each.gpu else None for each in seen])))
    requests: list[tuple[str, Values]] = [
        ("running", [reading.get("running") for reading in readings]),
        ("waiting", [waiting(reading) for reading in readings]),
    ]
    used = [None, *(cores(*pair) for pair in itertools.pairwise(seen))]
    memory = [each.processes and each.processes.memory_bytes / _MIB for each in seen]
    plots: list[tuple[str, str, list[tuple[str, Values]]]] = [
        ("Server: requests", "requests", requests),
        ("Server: in use", "%", shares),
        ("Server: processor", "cores", [("cores", used)]),
        ("Server: memory", "MiB", [("resident", memory)]),
    ]
    return [
        Plot(title, "seconds from the start", unit, x, known)
        for title, unit, series in plots
        if (known := [pair for pair in series if any(value is not None for value in pair[1])])
    ]


def _percent(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else 100 * value for value in values]


def _points(records: Sequence[Record]) -> Points:
    start = start_of(records)
    good = [record for record in records if record.is_good]
    shown = good[:: len(good) // _MAX_POINTS + 1]
    found = {"end to end": [(record.due - start, record.e2el * 1000) for record in shown]}
    first = [(record.due - start, record.ttft * 1000) for record in shown if record.ttft is not None]
    return scatter({**found, "to the first token": first} if first else found)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Values per step of `step_s` seconds; `times` are the starts of the steps, from the start of the run.

    `in_flight` is the mean of a step: a request that follows another does not count as a second one.
    """

    step_s: float
    times: Sequence[float]
    in_flight: Sequence[float]
    ended_per_s: Sequence[float]
    failed_per_s: Sequence[float]
    tokens_per_s: Sequence[float]


def start_of(records: Sequence[Record]) -> float:
    """Return when the first request was due."""
    return min((record.due for record in records), default=0.0)


def timeline(records: Sequence[Record]) -> Timeline:
    """Return what happened in each step of the run."""
    start = start_of(records)
    seconds = max((record.end - start for record in records), default=0.0)
    step = next((step for step in _STEPS_S if seconds / step <= _MAX_STEPS), _STEPS_S[-1])
    count = int(seconds / step) + 1
    changes, parts, ended, failed, tokens = ([0.0] * count for _ in range(5))

    def place(at: float) -> int:
        return min(max(int((at - start) / step), 0), count - 1)

    for record in records:
        for at, sign in ((record.due, 1), (record.end, -1)):
            changes[place(at)] += sign
            parts[place(at)] += sign * ((at - start) / step - place(at))
        (failed if record.error else ended)[place(record.end)] += 1
        for at, number in _token_times(record):
            tokens[place(at)] += number
    return Timeline(
        step,
        [number * step for number in range(count)],
        [level - part for level, part in zip(itertools.accumulate(changes), parts, strict=True)],
        *([value / step for value in values] for values in (ended, failed, tokens)),
    )


def _token_times(record: Record) -> Iterator[tuple[float, float]]:
    """Yield when tokens came, and how many. The tokens of a request are shared out equally among its events."""
    if record.first is None:
        yield record.end, record.output_tokens if record.is_good else 0
        return
    tokens = record.output_tokens / max(record.events, 1)
    for at in itertools.accumulate(record.gaps, initial=record.first):
        yield at, tokens
