"""Metrics as lines of the log in CloudWatch's embedded metric format (EMF), one for each model and minute.

CloudWatch makes metrics of such lines by itself wherever it collects the log of a container, as it does for SageMaker.
The form is that of AWS's "Specification: Embedded metric format". There are none unless `emf_namespace` is set.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Sequence
from operator import attrgetter
from typing import Any

from frontend.emf.settings import EmbeddedMetricsSettings
from frontend.features import ServerFeature, ServerParts
from frontend.observability.metrics.catalogue import HISTOGRAMS, POOL_GAUGES, TOKENS
from frontend.observability.metrics.model_metrics import ModelMetrics
from frontend.observability.server_log import WrittenLines
from lmi_server.contract.histogram import quantile
from lmi_server.serving.models.model import Model

_LOGGER = "emf"
_INTERVAL_S = 60.0
_SHARES = {"P50": 0.5, "P95": 0.95, "P99": 0.99}


def attach(server: ServerParts) -> ServerFeature | None:
    """Return the feature; None if there is no namespace."""
    namespace = server.settings.part(EmbeddedMetricsSettings).emf_namespace
    return None if namespace is None else EmbeddedMetrics(server, namespace)


class EmbeddedMetrics(ServerFeature):
    """Writes what has happened since the last line. `namespace` is that of CloudWatch."""

    def __init__(self, server: ServerParts, namespace: str) -> None:
        self._namespace = namespace
        self._metrics = server.metrics
        self._models = server.models
        self._before: dict[str, _Snapshot] = {}

    def tasks(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self._run(),)

    async def _run(self) -> None:
        """Write once a minute, until the task is cancelled; once more then."""
        try:
            while True:
                await asyncio.sleep(_INTERVAL_S)
                self._write()
        finally:
            self._write()

    def _write(self) -> None:
        """Write a line for each model."""
        lines = "".join(f"{json.dumps(self._line(model))}\n" for model in self._models.models)
        if lines:
            logging.getLogger(_LOGGER).handle(WrittenLines(_LOGGER, lines.encode()))

    def _line(self, model: Model) -> dict[str, Any]:
        series = self._metrics.for_model(model)
        series.settle()
        after = _Snapshot(series)
        values = after.since(self._before.get(model.label))
        self._before[model.label] = after
        if model.pool is not None:
            values |= {row.cloudwatch: (attrgetter(row.key)(model.pool), "Count") for row in POOL_GAUGES}
        described = {
            "Namespace": self._namespace,
            "Dimensions": [["Model"]],
            "Metrics": [{"Name": name, "Unit": unit} for name, (_, unit) in values.items()],
        }
        head = {"Timestamp": int(time.time() * 1000), "CloudWatchMetrics": [described]}
        return {"_aws": head, "Model": model.label, **{name: value for name, (value, _) in values.items()}}


class _Snapshot:
    """The counters of one model at one moment."""

    def __init__(self, series: ModelMetrics) -> None:
        codes = series.by_code.items()
        self._counts = {
            "Requests": sum(count for _, count in codes),
            "ClientErrors": sum(count for code, count in codes if 400 <= code < 500),
            "ServerErrors": sum(count for code, count in codes if code >= 500),
            **{row.cloudwatch: series.tokens(row.key) for row in TOKENS if row.cloudwatch},
        }
        self._times = {
            row.cloudwatch: (row.bounds, tuple(series.histograms[row.key].counts))
            for row in HISTOGRAMS
            if row.cloudwatch
        }

    def since(self, before: _Snapshot | None) -> dict[str, tuple[float, str]]:
        """Return value and unit of each metric since `before`, without times that did not occur."""
        counted = {} if before is None else before._counts
        values: dict[str, tuple[float, str]] = {
            name: (count - counted.get(name, 0), "Count") for name, count in self._counts.items()
        }
        for name, (bounds, counts) in self._times.items():
            earlier = [0] * len(counts) if before is None else before._times[name][1]
            changes = [now - then for now, then in zip(counts, earlier, strict=True)]
            for ending, share in _SHARES.items():
                seconds = quantile(bounds, changes, share)
                if seconds is not None:
                    values[name + ending] = (round(seconds * 1000, 3), "Milliseconds")
        return values
