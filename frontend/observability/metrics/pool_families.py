"""The gauges of models and their workers, which are read at each scrape."""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric as Family

from frontend.observability.metrics.families import Labels, counter, gauge, histogram
from lmi_server.machine.process_tree import tree_resident_bytes
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.reload import ReloadStatus
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.serving.pool_settings import ModelStatus

_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
_MODEL = ("model",)
_TOTAL = "_total"  # the end of the name of a counter


def pool_families(models: Sequence[Model]) -> Iterator[Family]:
    """Yield the state of each model and of its workers."""
    pools = [model.pool for model in models if model.pool is not None]

    def by_pool(value: Callable[[WorkerPool], float]) -> list[tuple[tuple[str], float]]:
        return [((pool.label,), value(pool)) for pool in pools]

    yield gauge(
        "lmi_queue_depth", "Requests that wait for a worker.", _MODEL, by_pool(lambda pool: pool.dispatcher.queued)
    )
    yield gauge(
        "lmi_requests_in_flight", "Requests that workers hold.", _MODEL, by_pool(lambda pool: pool.dispatcher.in_flight)
    )
    yield gauge("lmi_workers_ready", "Workers that can serve.", _MODEL, by_pool(lambda pool: len(pool.roster.ready)))
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
    yield counter(
        "lmi_worker_deaths", "Workers that ended although nobody asked.", _MODEL, by_pool(lambda pool: pool.deaths)
    )
    retries = by_pool(lambda pool: pool.dispatcher.recovery.retries)
    yield counter("lmi_requests_retried", "Requests that were sent to a worker again.", _MODEL, retries)
    yield histogram(
        "lmi_batch_size",
        "Requests of a batch; without batches, those that a worker had with each that it got.",
        {pool.label: pool.dispatcher.batch_sizes for pool in pools},
    )
    yield histogram(
        "lmi_model_load_seconds",
        "Start of a worker's process to its loaded model.",
        {pool.label: pool.load_times for pool in pools},
    )
    yield from _handler_families(pools)


def memory_families(processes: Mapping[tuple[str, str], int]) -> list[Family]:
    """Return the memory of workers, and what Prometheus' clients say of their own process.

    `processes` has the process of each worker by model and name. This reads /proc, so that it is for a thread.
    """
    memory = [(key, tree_resident_bytes(pid)) for key, pid in processes.items()]
    workers = gauge(
        "lmi_worker_resident_memory_bytes", "Memory of a worker and its processes in RAM.", ("model", "worker"), memory
    )
    return [workers, *_own_process().collect()]


@functools.cache
def build_family() -> Family:
    """Return what runs here: one sample of value 1, whose labels name it."""
    labels = {"version": version("lmi-server"), "python_version": platform.python_version()}
    return gauge("lmi_build_info", "The server that runs, always 1.", tuple(labels), [(tuple(labels.values()), 1)])


@functools.cache
def _own_process() -> ProcessCollector:
    """Return the one for this process. It asks once when the machine was started."""
    return ProcessCollector(pid=os.getpid, registry=None)


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
        yield make(f"lmi_handler_{name}", f"{name} of the handler.", ("model", "worker"), by_worker)
