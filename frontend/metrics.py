"""The metrics of the server, as `/metrics` shows them.

The relay feeds counters and histograms. Gauges are read from the models at each scrape. The label `model` is the name
of the model, with its version if it has one ("name:version").
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from frontend.engine_metrics import joined
from lmi_server.serving.pool import WorkerPool
from lmi_server.serving.pool_settings import ModelStatus
from lmi_server.serving.registry import Model

# Seconds; from a cached embedding to a long generation.
_DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_FIRST_BYTE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60)
_QUEUE_BUCKETS = (0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120)

_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


class ModelMetrics:
    """The series of one model. They are looked up once, because `labels()` costs more than the counting itself."""

    def __init__(self, name: str, requests: Counter, histograms: Sequence[Histogram]) -> None:
        self._name = name
        self._requests = requests
        self._histograms = histograms
        self._by_code: dict[int, Counter] = {}
        duration, first_byte, queue = (histogram.labels(name) for histogram in histograms)
        self._duration = duration.observe
        self._first_byte = first_byte.observe
        self._queue = queue.observe

    def refused(self, code: int) -> None:
        """Count a request that no worker saw."""
        self._count(code)

    def answered(self, code: int, queue_s: float, first_byte_s: float, duration_s: float) -> None:
        """Count a request that a worker answered; times are seconds since its arrival, `queue_s` those in the queue."""
        self._count(code)
        self._queue(queue_s)
        self._first_byte(first_byte_s)
        self._duration(duration_s)

    def remove(self) -> None:
        """Drop the series: the model is gone."""
        for code in self._by_code:
            self._requests.remove(self._name, str(code))
        for histogram in self._histograms:
            histogram.remove(self._name)

    def _count(self, code: int) -> None:
        counter = self._by_code.get(code)
        if counter is None:
            counter = self._by_code[code] = self._requests.labels(self._name, str(code))
        counter.inc()


class Metrics:
    """The metrics of one server; `models` returns the models that are registered at the moment."""

    def __init__(self, models: Callable[[], Sequence[Model]]) -> None:
        self._models = models
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "lmi_requests", "Inference requests by status code.", ("model", "code"), registry=self._registry
        )
        self._histograms = [
            self._histogram("lmi_request_duration_seconds", "Arrival to the last byte.", _DURATION_BUCKETS),
            self._histogram("lmi_time_to_first_byte_seconds", "Arrival to the first byte.", _FIRST_BYTE_BUCKETS),
            self._histogram("lmi_queue_time_seconds", "Time in the job queue.", _QUEUE_BUCKETS),
        ]
        self._series: dict[str, ModelMetrics] = {}
        self._unrouted = ModelMetrics("", self._requests, self._histograms)
        self._registry.register(_PoolCollector(models))

    def of(self, model: Model | None) -> ModelMetrics:
        """Return the series of `model`; None stands for requests that reached no model."""
        if model is None:
            return self._unrouted
        label = model.label
        series = self._series.get(label)
        if series is None:
            series = self._series[label] = ModelMetrics(label, self._requests, self._histograms)
        return series

    async def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, those of the engines last."""
        pools = [model.pool for model in self._models() if model.pool is not None]
        measured = await asyncio.gather(*(pool.engine_metrics() for pool in pools))
        texts = {
            (pool.label, worker): text
            for pool, by_worker in zip(pools, measured, strict=True)
            for worker, text in by_worker.items()
        }
        return self._own_text() + joined(texts)

    def _own_text(self) -> bytes:
        """Return the server's own metrics, and drop the series of models that are gone."""
        present = {model.label for model in self._models()}
        for label in self._series.keys() - present:
            self._series.pop(label).remove()
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, ("model",), buckets=buckets, registry=self._registry)


class _PoolCollector:
    def __init__(self, models: Callable[[], Sequence[Model]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        models = self._models()
        pools = [model.pool for model in models if model.pool is not None]
        yield _gauge("lmi_queue_depth", "Requests that wait for a worker.", [(p.label, p.queued) for p in pools])
        yield _gauge("lmi_requests_in_flight", "Requests that workers hold.", [(p.label, p.in_flight) for p in pools])
        yield _gauge("lmi_workers_ready", "Workers that can serve.", [(p.label, p.ready_workers) for p in pools])
        healthy = [(model.label, model.status is ModelStatus.HEALTHY) for model in models]
        yield _gauge("lmi_model_ready", "1 if the model can serve.", healthy)
        yield from _handler_gauges(pools)

    def describe(self) -> Iterator[Metric]:
        """Describe nothing in advance: the handlers' gauges are not known before the first scrape."""
        return iter(())


def _gauge(name: str, text: str, values: Sequence[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=("model",))
    for label, value in values:
        family.add_metric((label,), float(value))
    return family


def _handler_gauges(pools: Sequence[WorkerPool]) -> Iterator[Metric]:
    families: dict[str, GaugeMetricFamily] = {}
    for pool in pools:
        for worker, gauges in pool.worker_gauges().items():
            for key, value in gauges.items():
                name = "lmi_handler_" + _NOT_A_NAME.sub("_", key)
                if name not in families:
                    families[name] = GaugeMetricFamily(name, f"{key} of the handler.", labels=("model", "worker"))
                families[name].add_metric((pool.label, worker), value)
    yield from families.values()
