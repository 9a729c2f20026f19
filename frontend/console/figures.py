"""The figures of one model on the console, or of all: rates and percentiles, from what was counted at two moments."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from frontend.observability.metrics.model_metrics import ModelMetrics
from frontend.observability.metrics.quantile_sketch import added_between, sketch_quantile

_RATE_S = 3.0  # over which rates are taken: workers report once a second, not in step with the sampler
_LATENCY_S = 10.0
_SHARES = (0.5, 0.95, 0.99)

Row = dict[str, Any]


class ModelCounts(NamedTuple):
    """The counters of one model at one moment; the times are counted as `QuantileSketch.snapshot` returns them."""

    at: float
    tokens: float = 0
    prompt_tokens: float = 0
    cached_tokens: float = 0
    requests: int = 0
    first_token: Mapping[int, int] = {}
    token_gap: Mapping[int, int] = {}


class Window:
    """The counters of one model in the last seconds."""

    def __init__(self) -> None:
        self._counts: deque[ModelCounts] = deque()

    @property
    def first(self) -> ModelCounts:
        return self._counts[0]

    @property
    def last(self) -> ModelCounts:
        return self._counts[-1]

    def add(self, counts: ModelCounts) -> None:
        """Add the counts of now, and forget those older than the window."""
        self._counts.append(counts)
        while len(self._counts) > 2 and self._counts[1].at <= counts.at - _LATENCY_S:
            self._counts.popleft()

    def measure(self) -> Row:
        """Return rates over the last seconds, and percentiles of the requests that ended in the last ten."""
        last = self.last
        recent = next((each for each in reversed(self._counts) if each.at <= last.at - _RATE_S), self.first)
        seconds = last.at - recent.at
        return {
            "tokens": round_number(max(0.0, last.tokens - recent.tokens) / seconds) if seconds else 0,
            "requests": round_number(max(0, last.requests - recent.requests) / seconds) if seconds else 0,
            **measured_together([self]),
        }


def counts_of(series: ModelMetrics | None, gauges: Mapping[str, float], now: float) -> ModelCounts:
    """Return the counters of a model; those before its first request are needed to show this one."""
    if series is None:
        return ModelCounts(now, gauges.get("generated_tokens_total", 0.0))
    series.settle()
    adapters = series.adapters.values()
    # An engine that counts its tokens does so while it generates them, the front end when a request has ended.
    return ModelCounts(
        now,
        gauges.get("generated_tokens_total", sum(each.output_tokens for each in adapters)),
        sum(each.prompt_tokens for each in adapters),
        sum(each.cached_tokens for each in adapters),
        sum(series.by_code.values()),
        series.first_token_sketch.snapshot(),
        series.token_gap_sketch.snapshot(),
    )


def measured_together(windows: Collection[Window]) -> Row:
    """Return the share of cached tokens, and the percentiles of times, of several models together."""
    prompts = sum(window.last.prompt_tokens - window.first.prompt_tokens for window in windows)
    cached = sum(window.last.cached_tokens - window.first.cached_tokens for window in windows)
    first_token: Counter[int] = Counter()
    token_gap: Counter[int] = Counter()
    for window in windows:
        first_token.update(added_between(window.first.first_token, window.last.first_token))
        token_gap.update(added_between(window.first.token_gap, window.last.token_gap))
    return {
        "hits": round_number(cached / prompts) if prompts > 0 else None,
        "ttft": _percentiles(first_token),
        "itl": _percentiles(token_gap),
    }


def sums(rows: Sequence[Row], windows: Collection[Window]) -> Row:
    """Return the row of all models together."""
    loaded = [row for row in rows if "queue" in row]
    used = [row["kv"] for row in loaded if row["kv"] is not None]
    total: Row = {name: sum(row[name] for row in loaded) for name in ("queue", "running")}
    total |= {name: round_number(sum(row.get(name, 0) for row in loaded)) for name in ("tokens", "requests")}
    return total | {"kv": max(used, default=None)} | measured_together(windows)


def _percentiles(counts: Mapping[int, int]) -> list[float] | None:
    """Return the 50th, 95th and 99th percentile in milliseconds; None if nothing was counted."""
    if not counts:
        return None
    return [round_number((sketch_quantile(counts, share) or 0.0) * 1000) for share in _SHARES]


def round_number(value: float) -> float:
    return round(value, 3)
