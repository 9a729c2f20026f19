"""The metrics of the server, as `/metrics` shows them.

The relay counts in plain integers (`model_metrics.py`); names, labels and buckets are made of them at each scrape.
Gauges are read from the models then. The label `model` is the name of the model, with its version if it has one
("name:version").

`lmi.py` gives the same values under LMI's names, and what `record` was given; `vllm.py` gives them under vLLM's names.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from frontend.observability.metrics.engine_metrics import joined
from frontend.observability.metrics.exposition import open_metrics, text_format
from frontend.observability.metrics.families import labelled
from frontend.observability.metrics.lmi import LmiMetrics
from frontend.observability.metrics.metric_log import MetricLog
from frontend.observability.metrics.model_metrics import LoggedModelMetrics, ModelMetrics
from frontend.observability.metrics.pool_families import build_family, memory_families, pool_families
from frontend.observability.metrics.request_families import request_families
from frontend.observability.metrics.vllm import vllm_families
from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.metrics import Metric
from lmi_server.serving.models.model import Model
from lmi_server.serving.pool.engine_metrics import engine_metrics
from lmi_server.serving.pool.worker_pool import WorkerPool

PLAIN = "text/plain"
"""What a scraper accepts that says nothing else: Prometheus' text format."""

_OF_ENGINES = {"vllm": vllm_families}
"""The families of a model under the names of an engine that does not serve it."""


class Metrics:
    """The metrics of one server; `models` returns the models that are registered at the moment.

    With a `log`, every event is also a line there. `names` says whose names are shown beside the own ones.
    `before_reading` counts what has ended and waits to be counted.
    """

    def __init__(
        self,
        models: Callable[[], Sequence[Model]],
        log: MetricLog | None = None,
        names: Collection[str] = ("djl_serving", "vllm"),
    ) -> None:
        self.before_reading: Callable[[], None] = lambda: None
        self._models = models
        self._log = log
        self._names = names
        self._series: dict[str, ModelMetrics] = {}
        self._unrouted = self._new_series("")
        self._gone: Counter[int] = Counter()  # the requests by code of models that are unregistered
        self._lmi = LmiMetrics()
        self._report_own: set[str] = set()  # models whose engines report metrics themselves

    def of(self, model: Model | None) -> ModelMetrics:
        """Return the series of `model`; None stands for requests that reached no model."""
        if model is None:
            return self._unrouted
        label = model.label
        series = self._series.get(label)
        if series is None:
            series = self._series[label] = self._new_series(model.name)
        return series

    def counted(self, model: Model) -> ModelMetrics | None:
        """Return the series of a model that has had requests; None if it has had none."""
        return self._series.get(model.label)

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
        return (await self.exposition(PLAIN, names))[0]

    async def exposition(self, accept: str, names: Collection[str] = ()) -> tuple[bytes, str]:
        """Return all metrics in the format that the header Accept asks for, and its content type.

        It is OpenMetrics if `accept` names that, otherwise Prometheus' text format. With `names` only these metrics are
        returned.
        """
        content_type = choose_encoder(accept)[1]
        pools = [model.pool for model in self._models() if model.pool is not None]
        memory = asyncio.create_task(asyncio.to_thread(memory_families, _processes(pools)))
        measured = await asyncio.gather(*(engine_metrics(pool.roster.ready) for pool in pools))
        self.before_reading()
        engines = [
            *text_string_to_metric_families(joined(self._engine_texts(pools, measured)).decode()),
            *self._families_of_engines(pools),
        ]
        families = _chosen([*self._families(), *await memory, *_merged(engines)], names)
        write = text_format if content_type.startswith(PLAIN) else open_metrics
        return write(families), content_type

    def _engine_texts(
        self, pools: Sequence[WorkerPool], measured: Sequence[Mapping[str, bytes]]
    ) -> Mapping[tuple[str, str], bytes]:
        """Return the texts of all engines by model and worker."""
        for pool, by_worker in zip(pools, measured, strict=True):
            if by_worker:
                self._report_own.add(pool.label)
        return {
            (pool.label, worker): text
            for pool, by_worker in zip(pools, measured, strict=True)
            for worker, text in by_worker.items()
        }

    def _families_of_engines(self, pools: Sequence[WorkerPool]) -> Iterator[Family]:
        """Yield, for models whose engines report nothing, what an engine would whose names are shown."""
        for pool in pools:
            series = self._series.get(pool.label)
            if series is not None and pool.label not in self._report_own:
                series.settle()
                for name in self._names:
                    if name in _OF_ENGINES:
                        # The metrics of every engine have the label `model` here.
                        yield from labelled(_OF_ENGINES[name](series, pool), "model", pool.label)

    def _families(self) -> Iterator[Family]:
        self._drop_gone()
        for series in self._all():
            series.settle()
        yield build_family()
        yield from request_families(self._series, self._unrouted)
        yield from pool_families(self._models())
        if "djl_serving" in self._names:
            yield from self._djl_serving_families()
        yield from self._lmi.recorded()

    def _djl_serving_families(self) -> Iterator[Family]:
        responses = self._gone + sum((Counter(series.by_code) for series in self._all()), Counter())
        yield from self._lmi.families(responses, self._series.values())

    def _drop_gone(self) -> None:
        """Drop the series of models that are gone. Their requests stay in the sums over all models."""
        present = {model.label for model in self._models()}
        for label in self._series.keys() - present:
            self._gone.update(self._series.pop(label).by_code)
        self._report_own &= present

    def _all(self) -> Sequence[ModelMetrics]:
        return [self._unrouted, *self._series.values()]

    def _new_series(self, name: str) -> ModelMetrics:
        return ModelMetrics(name) if self._log is None else LoggedModelMetrics(name, self._log)


def _chosen(families: Iterable[Family], names: Collection[str]) -> Iterator[Family]:
    """Yield the families that a scrape asks for by name, or by the name of a sample; all without `names`."""
    wanted = set(names)
    for family in families:
        if not wanted or wanted & {family.name, *(sample.name for sample in family.samples)}:
            yield family


def _merged(families: Iterable[Family]) -> Iterable[Family]:
    """Return one family of each name, with the samples of all: several engines have the same ones."""
    by_name: dict[str, Family] = {}
    for family in families:
        first = by_name.setdefault(family.name, family)
        if first is not family:
            first.samples += family.samples
    return by_name.values()


def _processes(pools: Sequence[WorkerPool]) -> dict[tuple[str, str], int]:
    return {(pool.label, worker): pid for pool in pools for worker, pid in pool.roster.pids.items()}
