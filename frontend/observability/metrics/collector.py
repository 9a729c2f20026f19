"""The metrics of the server, as `/metrics` shows them.

The relay counts in plain integers (`model_metrics.py`); names, labels and buckets are made of them at each scrape
(`spellings.py`). Gauges are read from the models then. The label `model` is the name of the model, with its version if
it has one ("name:version").
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from frontend.observability.metrics.catalogue import DJL_ERRORS, djl_error
from frontend.observability.metrics.exposition import open_metrics, sample_names, text_format
from frontend.observability.metrics.lmi_logs import MetricLog
from frontend.observability.metrics.model_metrics import ModelMetrics
from frontend.observability.metrics.recorded import HOST, RecordedMetrics
from frontend.observability.metrics.spellings import (
    build_family,
    djl_families,
    model_families,
    process_families,
    request_families,
    vllm_families,
)
from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.metrics import Metric
from lmi_server.serving.models.model import Model
from lmi_server.serving.pool.engine_metrics import engine_metrics
from lmi_server.serving.pool.worker_pool import WorkerPool

PLAIN = "text/plain"
"""What a scraper accepts that says nothing else: Prometheus' text format."""

_ENGINE_SPELLINGS = {"vllm": vllm_families}
"""The families of models under the names of an engine that does not serve them."""


class Metrics:
    """The metrics of one server; `models` returns the models that are registered at the moment.

    With a `log`, every event is also a line there. `names` says whose names are shown beside the own ones. `sources`
    return further families at each scrape.
    """

    def __init__(
        self,
        models: Callable[[], Sequence[Model]],
        log: MetricLog | None = None,
        names: Collection[str] = ("djl_serving", "vllm"),
    ) -> None:
        self.sources: list[Callable[[], Iterable[Family]]] = []
        self._models = models
        self._log = log
        self._names = names
        self._series: dict[str, ModelMetrics] = {}
        self._unrouted = ModelMetrics("", log)
        self._of_removed_models: Counter[int] = Counter()  # their requests by code
        self._errors = dict.fromkeys(DJL_ERRORS, 0)
        self._recorded = RecordedMetrics()
        self._report_own: set[str] = set()  # models whose engines report metrics themselves

    def for_model(self, model: Model | None) -> ModelMetrics:
        """Return the series of `model`; None stands for requests that reached no model."""
        if model is None:
            return self._unrouted
        label = model.label
        series = self._series.get(label)
        if series is None:
            series = self._series[label] = ModelMetrics(model.name, self._log)
        return series

    def find(self, model: Model) -> ModelMetrics | None:
        """Return the series of a model that has had requests; None if it has had none."""
        return self._series.get(model.label)

    def count_error(self, error: LmiServerError) -> None:
        """Count an error that the server made itself, under DJL Serving's name for such errors."""
        name = djl_error(error)
        if name is not None:
            self._errors[name] += 1
            if self._log is not None:
                self._log.server(Metric(name, "Count", 1, (("Host", HOST),)))

    def record(self, metric: Metric) -> None:
        """Add a value that a worker printed or from the life of a model."""
        self._recorded.record(metric)
        if self._log is not None:
            self._log.model(metric)

    def record_server(self, metric: Metric) -> None:
        """Add a value that the life of the server yields."""
        self._recorded.record(metric)
        if self._log is not None:
            self._log.server(metric)

    async def exposition(self, accept: str, names: Collection[str] = ()) -> tuple[bytes, str]:
        """Return all metrics in the format that the header Accept asks for, and its content type.

        It is OpenMetrics if `accept` names that, otherwise Prometheus' text format. With `names` only these metrics are
        returned.
        """
        content_type = choose_encoder(accept)[1]
        pools = [model.pool for model in self._models() if model.pool is not None]
        workers = {(pool.label, worker): pid for pool in pools for worker, pid in pool.roster.pids.items()}
        processes = asyncio.create_task(asyncio.to_thread(process_families, workers))
        texts = await asyncio.gather(*(engine_metrics(pool.roster.ready) for pool in pools))
        families = [*self._families(), *await processes, *self._engine_families(pools, texts)]
        write = text_format if content_type.startswith(PLAIN) else open_metrics
        return write(_choose(families, names)), content_type

    def _families(self) -> Iterator[Family]:
        self._drop_removed_models()
        for series in self._all():
            series.settle()
        yield build_family()
        yield from request_families(self._series, self._unrouted)
        yield from model_families(self._models())
        if "djl_serving" in self._names:
            by_code = self._of_removed_models + sum((Counter(series.by_code) for series in self._all()), Counter())
            yield from djl_families(by_code, self._errors, list(self._series.values()))
        yield from self._recorded.families()
        for source in self.sources:
            yield from source()

    def _engine_families(self, pools: Sequence[WorkerPool], texts: Sequence[Mapping[str, bytes]]) -> Iterator[Family]:
        """Yield what engines report, by model and worker; for models whose engines do not, what an engine would."""
        for pool, by_worker in zip(pools, texts, strict=True):
            for worker, text in by_worker.items():
                self._report_own.add(pool.label)
                yield from parse_engine_metrics(text, pool.label, worker)
        others = [(self._series.get(pool.label), pool) for pool in pools if pool.label not in self._report_own]
        silent = [(series, pool) for series, pool in others if series is not None]
        for name in self._names:
            if name in _ENGINE_SPELLINGS:
                yield from _ENGINE_SPELLINGS[name](silent)

    def _drop_removed_models(self) -> None:
        """Drop the series of models that are unregistered. Their requests stay in the sums over all models."""
        present = {model.label for model in self._models()}
        for label in self._series.keys() - present:
            self._of_removed_models.update(self._series.pop(label).by_code)
        self._report_own &= present

    def _all(self) -> Sequence[ModelMetrics]:
        return [self._unrouted, *self._series.values()]


def parse_engine_metrics(text: bytes, model: str, worker: str) -> Iterator[Family]:
    """Yield the families of an engine's text in Prometheus' format; model and worker become labels of each sample."""
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            sample.labels.setdefault("model", model)
            sample.labels.setdefault("worker", worker)
        yield family


def _choose(families: Iterable[Family], names: Collection[str]) -> Iterable[Family]:
    """Return the families that a scrape asks for by name, or by the name of a sample; all without `names`."""
    return [family for family in families if sample_names(family) & set(names)] if names else families
