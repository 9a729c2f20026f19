"""The families of metrics, under this server's own names, vLLM's and DJL Serving's. Each scrape makes them anew."""

from __future__ import annotations

import functools
import os
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from operator import attrgetter

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric as Family

from frontend.observability.metrics import catalogue
from frontend.observability.metrics.exposition import Labels, counter, gauge, histogram
from frontend.observability.metrics.model_metrics import ModelMetrics
from frontend.observability.metrics.recorded import HOST
from lmi_server.contract.histogram import Histogram
from lmi_server.processes.tree import tree_resident_bytes
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.reload import ReloadStatus
from lmi_server.serving.pool.engine_metrics import summed_gauges
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.serving.pool_settings import ModelStatus

_MODEL = ("model",)
_ADAPTER = ("model", "adapter")
_WORKER = ("model", "worker")
_VLLM = ("model_name", "model")  # the metrics of every engine have the label `model` here
_MICROSECONDS = 1e6
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
_TOTAL = "_total"  # the end of the name of a counter


def request_families(series: Mapping[str, ModelMetrics], unrouted: ModelMetrics) -> Iterator[Family]:
    """Yield the counts of each model's requests, and under the label "" of requests without a model."""
    everything = {"": unrouted, **series}.items()
    yield counter(
        "lmi_requests",
        "Inference requests by status code.",
        ("model", "code"),
        [((label, str(code)), count) for label, model in everything for code, count in model.by_code.items()],
    )
    yield counter(
        "lmi_requests_refused",
        "Requests that no worker saw, because of the load.",
        ("model", "reason"),
        [((label, reason), count) for label, model in everything for reason, count in model.by_reason.items()],
    )
    for row in catalogue.HISTOGRAMS:
        if row.name:
            values = [((label,), model.histograms[row.key]) for label, model in series.items()]
            yield histogram(row.name, row.help, _MODEL, values)
    counts = [((label, adapter), each) for label, model in series.items() for adapter, each in model.adapters.items()]
    yield counter(
        "lmi_requests_finished",
        "Requests of text generation by how they ended.",
        (*_ADAPTER, "finish_reason"),
        [((*key, reason), count) for key, each in counts for reason, count in each.reasons.items()],
    )
    for row in catalogue.TOKENS:
        if row.name:
            yield counter(row.name, row.help, _ADAPTER, [(key, getattr(each, row.key)) for key, each in counts])


def model_families(models: Sequence[Model]) -> Iterator[Family]:
    """Yield the state of each model and of its workers."""
    pools = [model.pool for model in models if model.pool is not None]
    for make, rows in ((gauge, catalogue.POOL_GAUGES), (counter, catalogue.POOL_COUNTERS)):
        for row in rows:
            yield make(row.name, row.help, _MODEL, [((pool.label,), attrgetter(row.key)(pool)) for pool in pools])
    for row in catalogue.POOL_HISTOGRAMS:
        yield histogram(row.name, row.help, _MODEL, [((pool.label,), attrgetter(row.key)(pool)) for pool in pools])
    yield gauge(
        "lmi_workers",
        "Workers by state: ready, leaving (they finish their requests), starting.",
        ("model", "state"),
        [((pool.label, state), count) for pool in pools for state, count in pool.roster.states.items()],
    )
    yield gauge(
        "lmi_model_ready",
        "1 if the model can serve.",
        _MODEL,
        [((model.label,), model.status is ModelStatus.HEALTHY) for model in models],
    )
    yield counter(
        "lmi_model_reloads",
        "Attempts to load a model again, by what became of them: done, failed.",
        ("model", "outcome"),
        [
            ((model.label, status.value.lower()), model.reloads[status])
            for model in models
            for status in (ReloadStatus.DONE, ReloadStatus.FAILED)
        ],
    )
    yield from _handler_families(pools)


def _handler_families(pools: Sequence[WorkerPool]) -> Iterator[Family]:
    """Yield what the handlers report: counters if their names end with _total, otherwise gauges."""
    values: dict[str, list[tuple[Labels, float]]] = {}
    for pool in pools:
        for worker, reported in pool.roster.gauges.items():
            for key, value in reported.items():
                values.setdefault(_NOT_A_NAME.sub("_", key), []).append(((pool.label, worker), value))
    for key, by_worker in values.items():
        make = counter if key.endswith(_TOTAL) else gauge
        name = key.removesuffix(_TOTAL)
        yield make(f"lmi_handler_{name}", f"{name} of the handler.", _WORKER, by_worker)


@functools.cache
def build_family() -> Family:
    """Return what runs here: one sample of value 1, whose labels name it."""
    labels = {"version": version("lmi-server"), "python_version": platform.python_version()}
    return gauge("lmi_build_info", "The server that runs, always 1.", tuple(labels), [(tuple(labels.values()), 1)])


def process_families(workers: Mapping[tuple[str, str], int]) -> list[Family]:
    """Return the memory of workers, and what Prometheus' clients say of their own process.

    `workers` has the process of each worker by model and name. This reads /proc, so that it is for a thread.
    """
    text = "Memory of a worker and its processes in RAM."
    memory = [(key, tree_resident_bytes(pid)) for key, pid in workers.items()]
    return [gauge("lmi_worker_resident_memory_bytes", text, _WORKER, memory), *_own_process().collect()]


@functools.cache
def _own_process() -> ProcessCollector:
    """Return the one for this process. It asks once when the machine was started."""
    return ProcessCollector(pid=os.getpid, registry=None)


def vllm_families(models: Sequence[tuple[ModelMetrics, WorkerPool]]) -> Iterator[Family]:
    """Yield the figures that vLLM would report of models that it does not serve, for dashboards made for vLLM."""
    if not models:
        return
    keyed = [((metrics.name, pool.label), metrics, pool) for metrics, pool in models]
    gauges = [(key, pool, summed_gauges(pool.roster.gauges)) for key, _, pool in keyed]
    for make, figures in ((gauge, catalogue.VLLM_GAUGES), (counter, catalogue.VLLM_COUNTERS)):
        for figure in figures:
            read = [(key, figure.read(pool, summed)) for key, pool, summed in gauges]
            values = [(key, value) for key, value in read if value is not None]
            if values:
                yield make(f"vllm:{figure.name}", figure.help, _VLLM, values)
    for row in catalogue.HISTOGRAMS:
        if row.vllm:
            histograms = [(key, metrics.histograms[row.key]) for key, metrics, _ in keyed]
            yield histogram(f"vllm:{row.vllm}", row.vllm_help or row.help, _VLLM, histograms)
    for row in catalogue.TOKENS:
        if row.vllm:
            yield counter(f"vllm:{row.vllm}", row.help, _VLLM, [(key, m.tokens(row.key)) for key, m, _ in keyed])
    ended: Counter[tuple[str, ...]] = Counter()
    for key, metrics, _ in keyed:
        for adapter in metrics.adapters.values():
            for reason, count in adapter.reasons.items():
                ended[*key, catalogue.VLLM_FINISH_REASONS[reason]] += count
    yield counter("vllm:request_success", "Requests by how they ended.", (*_VLLM, "finished_reason"), ended.items())


def djl_families(
    by_code: Mapping[int, int], errors: Mapping[str, int], series: Sequence[ModelMetrics]
) -> Iterator[Family]:
    """Yield the requests of all models under DJL Serving's names. `by_code` has the number of answers by status."""
    counts = Counter(dict.fromkeys((*catalogue.DJL_RESPONSES, *catalogue.DJL_ERRORS), 0))
    for code, count in by_code.items():
        name = catalogue.djl_response(code)
        if name is not None:
            counts[name] += count
    counts.update(errors)
    for name, count in counts.items():
        yield counter(name, "Unit: Count.", ("Host",), [((HOST,), count)])
    versions: dict[str, list[ModelMetrics]] = defaultdict(list)
    for metrics in series:
        versions[metrics.name].append(metrics)
    for row in catalogue.HISTOGRAMS:
        if row.djl_serving:
            values = [((name,), _sum([each.histograms[row.key] for each in all_])) for name, all_ in versions.items()]
            yield histogram(row.djl_serving, "Unit: Microseconds.", ("Model",), values, _MICROSECONDS)


def _sum(histograms: Sequence[Histogram]) -> Histogram:
    """Return the values of all versions of a model together."""
    total = Histogram(histograms[0].bounds)
    for each in histograms:
        total.add(each)
    return total
