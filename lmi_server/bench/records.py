"""The measurements of each request, and the figures over all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
LATENCIES = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token, inter-token latency and end-to-end latency, as vLLM names them."""


@dataclass(slots=True)
class Record:
    """One request, with times in seconds of one monotonic clock. Latencies count from `due`, when it was to be sent.

    So a request that is sent late counts as slow, not as a later one (coordinated omission).
    """

    due: float
    sent: float = 0.0
    first: float | None = None
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    events: int = 0
    status: int = 0
    error: str | None = None
    adapter: str | None = None
    usage: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return self.error is None

    @property
    def output_tokens(self) -> int:
        """Return the tokens that the server reports, otherwise the events with tokens."""
        return self.usage.get("completion_tokens", self.events)

    @property
    def e2el(self) -> float:
        return self.end - self.due

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.due

    @property
    def tpot(self) -> float | None:
        """Return the mean time of each token after the first one."""
        if self.first is None or self.output_tokens < 2:
            return None
        return (self.end - self.first) / (self.output_tokens - 1)

    def meets(self, limits: Mapping[str, float]) -> bool:
        """Return whether the request succeeded within limits in seconds, by names of LATENCIES."""
        values = {"ttft": self.ttft, "tpot": self.tpot, "itl": max(self.gaps, default=None), "e2el": self.e2el}
        return self.is_good and all((value := values[name]) is None or value <= limit for name, limit in limits.items())


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of the values do not exceed (nearest rank); `ordered` has one at least."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def distribution(values: Iterable[float]) -> dict[str, float]:
    """Return mean and quantiles; nothing if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {"mean": math.fsum(ordered) / len(ordered)} | {
        name: quantile(ordered, share) for name, share in QUANTILES.items()
    }


def summary(records: Sequence[Record], limits: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of one run: counts, rates per second, latencies in milliseconds.

    The run lasts from the first request that was due to the last answer. Latencies count successful requests only;
    `goodput` is the rate of requests within `limits` (in seconds).
    """
    good = [record for record in records if record.is_good]
    start = min((record.due for record in records), default=0.0)
    seconds = max((record.end for record in records), default=0.0) - start
    rate = 1 / seconds if seconds > 0 else 0.0
    output = sum(record.output_tokens for record in good)
    prompt = _total(good, "prompt_tokens")
    result: dict[str, Any] = {
        "requests": len(records),
        "completed": len(good),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "duration_s": seconds,
        "requests_per_s": len(good) * rate,
        "output_tokens": output,
        "output_tokens_per_s": output * rate,
        "prompt_tokens": prompt,
        "cached_tokens": _total(good, "cached_tokens"),
        "sent_late_ms": _milliseconds(distribution(record.sent - record.due for record in records)),
    }
    if limits:
        result["goodput_per_s"] = sum(record.meets(limits) for record in records) * rate
    result["ttft_ms"] = _milliseconds(distribution(value for record in good if (value := record.ttft) is not None))
    result["tpot_ms"] = _milliseconds(distribution(value for record in good if (value := record.tpot) is not None))
    result["itl_ms"] = _milliseconds(distribution(gap for record in good for gap in record.gaps))
    result["e2el_ms"] = _milliseconds(distribution(record.e2el for record in good))
    return result


def _total(records: Sequence[Record], name: str) -> int | None:
    """Return the sum of a count that servers may report; None if none does."""
    counts = [record.usage[name] for record in records if name in record.usage]
    return sum(counts) if counts else None


def _milliseconds(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value * 1000 for name, value in values.items()}
