"""The metrics of the server, as `/metrics` shows them.

The relay counts in plain integers; names, labels and buckets are made of them at each scrape. Gauges are read from the
models then. The label `model` is the name of the model, with its version if it has one ("name:version").

`frontend/lmi_metrics.py` gives the same values under LMI's names, and what `record` was given.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from frontend.engine_metrics import joined
from frontend.histogram import Histogram
from frontend.lmi_metrics import LmiMetrics
from frontend.metric_log import MetricLog
from lmi_server.contract.errors import DeadlineError, KeyBusyError, LmiServerError, QueueDelayError, QueueFullError
from lmi_server.contract.metrics import Metric
from lmi_server.serving.pool import WorkerPool
from lmi_server.serving.pool_settings import ModelStatus
from lmi_server.serving.registry import Model

# Seconds; from a cached embedding to a long generation.
_DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_FIRST_BYTE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60)
_QUEUE_BUCKETS = (0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120)

_REASONS: Mapping[type[LmiServerError], str] = {
    QueueFullError: "queue_full",
    QueueDelayError: "queue_delay",
    DeadlineError: "deadline",
    KeyBusyError: "key_limit",
}
"""Why requests are refused that the server could serve if it had less to do."""

_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


class ModelMetrics:
    """What is counted of the requests of one model. `name` is its name without its version, "" for none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.by_code: dict[int, int] = {}
        self.by_reason: dict[str, int] = {}
        self.duration = Histogram(_DURATION_BUCKETS)
        self.first_byte = Histogram(_FIRST_BYTE_BUCKETS)
        self.queue = Histogram(_QUEUE_BUCKETS)

    def refused(self, code: int) -> None:
        """Count a request that no worker saw."""
        self.by_code[code] = self.by_code.get(code, 0) + 1

    def turned_away(self, error: LmiServerError) -> None:
        """Count why no worker saw a request, if the load is the reason."""
        reason = _REASONS.get(type(error))
        if reason is not None:
            self.by_reason[reason] = self.by_reason.get(reason, 0) + 1

    def answered(self, code: int, queue_s: float, first_byte_s: float, duration_s: float) -> None:
        """Count a request that a worker answered; times are seconds since its arrival, `queue_s` those in the queue."""
        self.by_code[code] = self.by_code.get(code, 0) + 1
        self.queue.observe(queue_s)
        self.first_byte.observe(first_byte_s)
        self.duration.observe(duration_s)


class _LoggedModelMetrics(ModelMetrics):
    """Counts, and writes the log of metrics."""

    def __init__(self, name: str, log: MetricLog) -> None:
        super().__init__(name)
        self._log = log

    def refused(self, code: int) -> None:
        super().refused(code)
        self._log.response(code)

    def answered(self, code: int, queue_s: float, first_byte_s: float, duration_s: float) -> None:
        super().answered(code, queue_s, first_byte_s, duration_s)
        self._log.request(self.name, queue_s, duration_s)
        self._log.response(code)


class Metrics:
    """The metrics of one server; `models` returns the models that are registered at the moment.

    With a `log`, every event is also a line there.
    """

    def __init__(self, models: Callable[[], Sequence[Model]], log: MetricLog | None = None) -> None:
        self._models = models
        self._log = log
        self._series: dict[str, ModelMetrics] = {}
        self._unrouted = self._new_series("")
        self._gone: Counter[int] = Counter()  # the requests by code of models that are unregistered
        self._lmi = LmiMetrics()
        self._pools = _PoolCollector(models)

    def of(self, model: Model | None) -> ModelMetrics:
        """Return the series of `model`; None stands for requests that reached no model."""
        if model is None:
            return self._unrouted
        label = model.label
        series = self._series.get(label)
        if series is None:
            series = self._series[label] = self._new_series(model.name)
        return series

    def failed(self, error: LmiServerError) -> None:
        """Count an error that the server made itself, under LMI's name for such errors."""
        metric = self._lmi.failed(error)
        if metric is not None and self._log is not None:
            self._log.server(metric)

    def record(self, metric: Metric) -> None:
        """Add a value that a worker printed or that the life of a model yields."""
        self._lmi.record(metric)
        if self._log is not None:
            self._log.model(metric)

    def record_server(self, metric: Metric) -> None:
        """Add a value that the life of the server yields."""
        self._lmi.record(metric)
        if self._log is not None:
            self._log.server(metric)

    async def text(self, names: Collection[str] = ()) -> bytes:
        """Return all metrics in Prometheus' text format, those of the engines last; with `names` only those."""
        pools = [model.pool for model in self._models() if model.pool is not None]
        measured = await asyncio.gather(*(pool.engine_metrics() for pool in pools))
        texts = {
            (pool.label, worker): text
            for pool, by_worker in zip(pools, measured, strict=True)
            for worker, text in by_worker.items()
        }
        return generate_latest(_Chosen(self._families(), names)) + joined(texts, names)

    def _families(self) -> Iterator[Family]:
        self._drop_gone()
        yield from _request_families(self._series, self._unrouted)
        yield from self._pools.collect()
        responses = self._gone + sum((Counter(series.by_code) for series in self._all()), Counter())
        yield from self._lmi.families(responses, self._series.values())

    def _drop_gone(self) -> None:
        """Drop the series of models that are gone. Their requests stay in the sums over all models."""
        present = {model.label for model in self._models()}
        for label in self._series.keys() - present:
            self._gone.update(self._series.pop(label).by_code)

    def _all(self) -> Sequence[ModelMetrics]:
        return [self._unrouted, *self._series.values()]

    def _new_series(self, name: str) -> ModelMetrics:
        return ModelMetrics(name) if self._log is None else _LoggedModelMetrics(name, self._log)


class _Chosen(Collector):
    """The families that a scrape asks for by name, or by the name of a sample; all without `names`."""

    def __init__(self, families: Iterable[Family], names: Collection[str]) -> None:
        self._families = families
        self._names = set(names)

    def collect(self) -> Iterator[Family]:
        for family in self._families:
            if not self._names or self._names & {family.name, *(sample.name for sample in family.samples)}:
                yield family


def _request_families(series: Mapping[str, ModelMetrics], unrouted: ModelMetrics) -> Iterator[Family]:
    requests = CounterMetricFamily("lmi_requests", "Inference requests by status code.", labels=("model", "code"))
    for label, model in {"": unrouted, **series}.items():
        for code, count in model.by_code.items():
            requests.add_metric((label, str(code)), count)
    yield requests
    refused = CounterMetricFamily(
        "lmi_requests_refused", "Requests that no worker saw, because of the load.", labels=("model", "reason")
    )
    for label, model in {"": unrouted, **series}.items():
        for reason, count in model.by_reason.items():
            refused.add_metric((label, reason), count)
    yield refused
    by_label = series.items()
    yield _histogram("request_duration", "Arrival to the last byte.", [(k, m.duration) for k, m in by_label])
    yield _histogram("time_to_first_byte", "Arrival to the first byte.", [(k, m.first_byte) for k, m in by_label])
    yield _histogram("queue_time", "Time in the job queue.", [(k, m.queue) for k, m in by_label])


def _histogram(name: str, text: str, values: Iterable[tuple[str, Histogram]]) -> Family:
    family = HistogramMetricFamily(f"lmi_{name}_seconds", text, labels=("model",))
    for label, histogram in values:
        family.add_metric((label,), histogram.cumulative(), histogram.sum)
    return family


class _PoolCollector:
    def __init__(self, models: Callable[[], Sequence[Model]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Family]:
        models = self._models()
        pools = [model.pool for model in models if model.pool is not None]
        yield _gauge("lmi_queue_depth", "Requests that wait for a worker.", [(p.label, p.queued) for p in pools])
        yield _gauge("lmi_requests_in_flight", "Requests that workers hold.", [(p.label, p.in_flight) for p in pools])
        yield _gauge("lmi_workers_ready", "Workers that can serve.", [(p.label, p.ready_workers) for p in pools])
        healthy = [(model.label, model.status is ModelStatus.HEALTHY) for model in models]
        yield _gauge("lmi_model_ready", "1 if the model can serve.", healthy)
        yield from _handler_gauges(pools)


def _gauge(name: str, text: str, values: Sequence[tuple[str, float]]) -> Family:
    family = GaugeMetricFamily(name, text, labels=("model",))
    for label, value in values:
        family.add_metric((label,), float(value))
    return family


def _handler_gauges(pools: Sequence[WorkerPool]) -> Iterator[Family]:
    families: dict[str, GaugeMetricFamily] = {}
    for pool in pools:
        for worker, gauges in pool.worker_gauges().items():
            for key, value in gauges.items():
                name = "lmi_handler_" + _NOT_A_NAME.sub("_", key)
                if name not in families:
                    families[name] = GaugeMetricFamily(name, f"{key} of the handler.", labels=("model", "worker"))
                families[name].add_metric((pool.label, worker), value)
    yield from families.values()
