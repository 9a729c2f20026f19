"""How one setting is judged: the model is loaded with it, and a load is put on it until it keeps the limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import uvloop

from lmi_server.bench.arrivals import ClosedLoop
from lmi_server.bench.client import Target
from lmi_server.bench.records import summary
from lmi_server.bench.run import Run, RunLength
from lmi_server.bench.workload import Workload, with_adapters
from lmi_server.client.trial_server import LoadFailedError, TrialServer
from lmi_server.tune.outcome import GOODPUT, THROUGHPUT, Outcome

_SHORT = 5  # the short run before has a fifth of the requests
_HOPELESS = 0.6  # of the best value, below which a short run ends a trial
_REQUEST_S = 600.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a setting must keep: p99 in seconds by name of the latency, and the share of prompt tokens in the cache.

    With `of_each_request` a request counts only if it keeps the latencies, as in goodput.
    """

    p99_s: Mapping[str, float]
    min_cache_hit: float = 0.0
    of_each_request: bool = False

    def broken_by(self, figures: Mapping[str, Any]) -> str:
        """Return which limits the figures of a run exceed; empty if none."""
        problems = [] if self.of_each_request else self._slow_p99s(figures)
        if self.min_cache_hit and (share := cache_hit(figures)) < self.min_cache_hit:
            problems.append(f"{share:.0%} of prompt tokens were in the cache, less than {self.min_cache_hit:.0%}")
        return "; ".join(problems)

    def _slow_p99s(self, figures: Mapping[str, Any]) -> list[str]:
        return [
            f"p99 of {name} is {p99 / 1000:.2f} s, more than {limit:g}"
            for name, limit in self.p99_s.items()
            if (p99 := figures[f"{name}_ms"].get("p99")) is None or p99 > limit * 1000
        ]


def cache_hit(figures: Mapping[str, Any]) -> float:
    """Return the share of prompt tokens that were in the prefix cache, 0 if the server does not say it."""
    return (figures.get("cached_tokens") or 0) / (figures.get("prompt_tokens") or 1)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The traffic of each trial: `requests` of `workload`, `concurrency` at a time."""

    target: Target
    workload: Workload
    weights: Mapping[str, float]
    requests: int
    concurrency: int
    seed: int

    def run(
        self, concurrency: int, requests: int, number: int, limits: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """Return the figures of a run, with the goodput within `limits`; no two numbers have the same prompts."""
        seed = self.seed + number
        prompts = with_adapters(self.workload.prompts(seed), self.weights, seed)
        run = Run(self.target, ClosedLoop(concurrency), prompts, RunLength(requests, None, _REQUEST_S))
        return summary(uvloop.run(run.run(seed)), limits or {})


class Measurement:
    """Judges settings of one model on one server. `start` returns a server in place of one that has died."""

    def __init__(
        self, model: str, traffic: Traffic, limits: Limits, load_timeout_s: float, start: Callable[[], TrialServer]
    ) -> None:
        self._model = model
        self._traffic = traffic
        self._limits = limits
        self._load_timeout_s = load_timeout_s
        self._start = start
        self._server = start()

    @property
    def _unit(self) -> str:
        return GOODPUT if self._limits.of_each_request else THROUGHPUT

    @property
    def server(self) -> TrialServer:
        """Return the server; a new one if it has died."""
        if not self._server.is_running:
            self._server = self._start()
        return self._server

    def __call__(self, settings: Mapping[str, str], best: float) -> Outcome:
        """Return what the settings give. A model that does not load, or dies, is an outcome like any other."""
        server = self.server
        began = time.monotonic()
        try:
            server.load(self._model, settings, self._load_timeout_s)
        except LoadFailedError as error:
            server.unload()
            return Outcome(None, reason=f"it does not load: {error}", load_s=time.monotonic() - began)
        load_s = time.monotonic() - began
        try:
            return replace(self._judge(best), load_s=load_s)
        finally:
            server.unload()

    def _judge(self, best: float) -> Outcome:
        traffic = replace(self._traffic, target=self._traffic.target.at(self._server.url))
        short = max(traffic.requests // _SHORT, traffic.concurrency)
        figures = traffic.run(traffic.concurrency, short, 0)
        if not figures["completed"]:
            return Outcome(None, traffic.concurrency, figures, _errors(figures))
        # Far slower than the best, with or without the limits: the limits could only make it slower.
        value = figures["requests_per_s" if self._limits.of_each_request else "output_tokens_per_s"]
        if value < _HOPELESS * best:
            return Outcome(
                value, traffic.concurrency, figures, "given up after a short run", is_pruned=True, unit=self._unit
            )
        return self._within_limits(traffic)

    def _within_limits(self, traffic: Traffic) -> Outcome:
        """Return the outcome at the highest concurrency that keeps the limits, halving it until it does.

        The number of requests stays: the p99 of fewer would be another figure.
        """
        concurrency, number, problem = traffic.concurrency, 1, ""
        figures: dict[str, Any] = {}
        while concurrency >= 1:
            figures = traffic.run(concurrency, traffic.requests, number, self._limits.p99_s)
            if figures["errors"]:
                return Outcome(None, concurrency, figures, _errors(figures))
            problem = self._limits.broken_by(figures)
            if not problem:
                return self._outcome(concurrency, figures)
            concurrency, number = concurrency // 2, number + 1
        return Outcome(None, 1, figures, problem)

    def _outcome(self, concurrency: int, figures: dict[str, Any]) -> Outcome:
        value = figures["goodput_per_s" if self._limits.of_each_request else "output_tokens_per_s"]
        if not value:
            return Outcome(None, concurrency, figures, "no request keeps the limits")
        return Outcome(value, concurrency, figures, unit=self._unit)


def _errors(figures: Mapping[str, Any]) -> str:
    return "; ".join(f"{count} requests: {error}" for error, count in figures["errors"].items())
