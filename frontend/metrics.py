"""What `/metrics` tells.

Counters and histograms are fed by the relay; gauges are read from the pools at each scrape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from lmi_server.worker_pool import ModelStatus, WorkerPool

# Seconds; from a cached embedding to a long generation.
_DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_FIRST_BYTE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60)
_QUEUE_BUCKETS = (0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120)

_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


class ModelMetrics:
    """The series of one model, looked up once: `labels()` per request costs more than counting."""

    def __init__(self, name: str, requests: Counter, histograms: Sequence[Histogram]) -> None:
        self._name = name
        self._requests = requests
        self._by_code: dict[int, Counter] = {}
        duration, first_byte, queue = (histogram.labels(name) for histogram in histograms)
        self._duration = duration.observe
        self._first_byte = first_byte.observe
        self._queue = queue.observe

    def refused(self, code: int) -> None:
        """Count a request that no worker saw."""
        self._count(code)

    def answered(self, code: int, queue_s: float, first_byte_s: float, duration_s: float) -> None:
        """Count a request that a worker answered; the times are in seconds from its arrival, `queue_s` in the queue."""
        self._count(code)
        self._queue(queue_s)
        self._first_byte(first_byte_s)
        self._duration(duration_s)

    def _count(self, code: int) -> None:
        counter = self._by_code.get(code)
        if counter is None:
            counter = self._by_code[code] = self._requests.labels(self._name, str(code))
        counter.inc()


class Metrics:
    """The registry of one server."""

    def __init__(self, pools: Sequence[WorkerPool]) -> None:
        self._registry = CollectorRegistry()
        requests = Counter(
            "lmi_requests", "Inference requests by status code.", ("model", "code"), registry=self._registry
        )
        histograms = [
            self._histogram("lmi_request_duration_seconds", "Arrival to the last byte.", _DURATION_BUCKETS),
            self._histogram("lmi_time_to_first_byte_seconds", "Arrival to the first byte.", _FIRST_BYTE_BUCKETS),
            self._histogram("lmi_queue_time_seconds", "Time in the job queue.", _QUEUE_BUCKETS),
        ]
        self._models = {pool.name: ModelMetrics(pool.name, requests, histograms) for pool in pools}
        self._unrouted = ModelMetrics("", requests, histograms)
        self._registry.register(_PoolCollector(pools))

    def of(self, pool: WorkerPool | None) -> ModelMetrics:
        """Return the series of the model that `pool` serves; of no model where it is None."""
        return self._unrouted if pool is None else self._models[pool.name]

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, ("model",), buckets=buckets, registry=self._registry)


class _PoolCollector:
    def __init__(self, pools: Sequence[WorkerPool]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("lmi_queue_depth", "Requests that wait for a worker.", lambda pool: pool.queued)
        yield self._gauge("lmi_requests_in_flight", "Requests that workers hold.", lambda pool: pool.in_flight)
        yield self._gauge("lmi_workers_ready", "Workers that can serve.", lambda pool: pool.ready_workers)
        yield self._gauge(
            "lmi_model_ready", "1 where the model can serve.", lambda pool: pool.status is ModelStatus.HEALTHY
        )
        yield from self._handler_gauges()

    def describe(self) -> Iterator[Metric]:
        """Tell nothing before the first scrape: the handlers' gauges are not known yet."""
        return iter(())

    def _gauge(self, name: str, text: str, value: Callable[[WorkerPool], float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model",))
        for pool in self._pools:
            family.add_metric((pool.name,), float(value(pool)))
        return family

    def _handler_gauges(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for pool in self._pools:
            for worker, gauges in pool.worker_gauges().items():
                for key, value in gauges.items():
                    name = "lmi_handler_" + _NOT_A_NAME.sub("_", key)
                    if name not in families:
                        families[name] = GaugeMetricFamily(name, f"{key} of the handler.", labels=("model", "worker"))
                    families[name].add_metric((pool.name, worker), value)
        yield from families.values()
