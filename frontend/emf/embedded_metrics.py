"""Metrics as lines of the log in CloudWatch's embedded metric format (EMF), one for each model and minute.

CloudWatch makes metrics of such lines by itself wherever it collects the log of a container, as it does for SageMaker.
The form is that of AWS's "Specification: Embedded metric format".
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from frontend.observability.metrics.collector import Metrics
from frontend.observability.metrics.model_metrics import ModelMetrics
from frontend.observability.server_log import WrittenLines
from lmi_server.contract.histogram import Histogram, quantile
from lmi_server.serving.models import Model

_LOGGER = "emf"
_INTERVAL_S = 60.0
_SHARES = {"P50": 0.5, "P95": 0.95, "P99": 0.99}


class EmbeddedMetrics:
    """Writes what has happened since the last line. `namespace` is that of CloudWatch."""

    def __init__(self, namespace: str, metrics: Metrics, models: Callable[[], Sequence[Model]]) -> None:
        self._namespace = namespace
        self._metrics = metrics
        self._models = models
        self._before: dict[str, _Counts] = {}

    async def run(self) -> None:
        """Write once a minute, until the task is cancelled; once more then."""
        try:
            while True:
                await asyncio.sleep(_INTERVAL_S)
                self.write()
        finally:
            self.write()

    def write(self) -> None:
        """Write a line for each model."""
        lines = [json.dumps(self._line(model)) for model in self._models()]
        if lines:
            logging.getLogger(_LOGGER).handle(WrittenLines(_LOGGER, lines))

    def _line(self, model: Model) -> dict[str, Any]:
        series = self._metrics.of(model)
        series.settle()
        after = _Counts(series)
        values = after.since(self._before.get(model.label))
        self._before[model.label] = after
        if model.pool is not None:
            gauges = (model.pool.queued, model.pool.in_flight, model.pool.ready_workers)
            names = ("QueueDepth", "RequestsInFlight", "WorkersReady")
            values |= {name: (value, "Count") for name, value in zip(names, gauges, strict=True)}
        described = {
            "Namespace": self._namespace,
            "Dimensions": [["Model"]],
            "Metrics": [{"Name": name, "Unit": unit} for name, (_, unit) in values.items()],
        }
        head = {"Timestamp": int(time.time() * 1000), "CloudWatchMetrics": [described]}
        return {"_aws": head, "Model": model.label, **{name: value for name, (value, _) in values.items()}}


class _Counts:
    """The counters of one model at one moment."""

    def __init__(self, series: ModelMetrics) -> None:
        adapters = series.adapters.values()
        self._counts = {
            "Requests": sum(series.by_code.values()),
            "ClientErrors": sum(count for code, count in series.by_code.items() if 400 <= code < 500),
            "ServerErrors": sum(count for code, count in series.by_code.items() if code >= 500),
            "PromptTokens": sum(each.prompt_tokens for each in adapters),
            "OutputTokens": sum(each.output_tokens for each in adapters),
        }
        times = {
            "Duration": series.duration,
            "QueueTime": series.queue,
            "TimeToFirstToken": series.first_token,
            "InterTokenLatency": series.token_gap,
        }
        self._times = {name: (histogram, tuple(histogram.counts)) for name, histogram in times.items()}

    def since(self, before: _Counts | None) -> dict[str, tuple[float, str]]:
        """Return value and unit of each metric since `before`; times of which there were none are left out."""
        counted = {} if before is None else before._counts
        values: dict[str, tuple[float, str]] = {
            name: (count - counted.get(name, 0), "Count") for name, count in self._counts.items()
        }
        for name, (histogram, _) in self._times.items():
            changes = self._changes(name, histogram, before)
            for ending, share in _SHARES.items():
                seconds = quantile(histogram.bounds, changes, share)
                if seconds is not None:
                    values[name + ending] = (round(seconds * 1000, 3), "Milliseconds")
        return values

    def _changes(self, name: str, histogram: Histogram, before: _Counts | None) -> list[int]:
        counts = self._times[name][1]
        earlier = [0] * len(counts) if before is None else before._times[name][1]
        return [now - then for now, then in zip(counts, earlier, strict=True)]
