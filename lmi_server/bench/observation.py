"""What the server does during a run: a thread reads its metrics and the use of its processes and GPUs once a second."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmi_server.bench import server_metrics
from lmi_server.bench.records import Record, summary
from lmi_server.bench.server_metrics import Reading
from lmi_server.client.server_calls import increase
from lmi_server.machine.device_tools import GpuLoad, nvidia_load
from lmi_server.processes.usage import ProcessUsage, measure_usage

_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen at one moment of the load generator's clock; None is what cannot be seen."""

    at: float
    reading: Reading
    processes: ProcessUsage | None = None
    gpu: GpuLoad | None = None


@dataclass(frozen=True, slots=True)
class Observer:
    """What to look at. Without a `metrics_url`, a process or variables with a PATH, that part is left out."""

    metrics_url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    pid: int | None = None
    variables: Mapping[str, str] | None = None

    def observe(self) -> Observation:
        """Return what is seen now. A server that does not answer shows nothing."""
        reading: Reading = {}
        if self.metrics_url is not None:
            with contextlib.suppress(OSError, ValueError):
                reading = server_metrics.fetch(self.metrics_url, self.headers)
        return Observation(
            time.perf_counter(),
            reading,
            None if self.pid is None else measure_usage(self.pid),
            None if self.variables is None else nvidia_load(self.variables),
        )

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[Observation]]:
        """Look once a second, and before and after; yield the list that grows."""
        seen = [self.observe()]
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_INTERVAL_S):
                seen.append(self.observe())

        thread = threading.Thread(target=watch, name="observation", daemon=True)
        thread.start()
        try:
            yield seen
        finally:
            ended.set()
            thread.join()
            seen.append(self.observe())


@dataclass(frozen=True, slots=True)
class Measured:
    """A run: its requests, and what was seen of the server meanwhile."""

    records: Sequence[Record]
    seen: Sequence[Observation]

    def figures(self, limits: Mapping[str, float]) -> dict[str, Any]:
        """Return the figures of `records.summary`, and those of the server under "server"."""
        return {**summary(self.records, limits), "server": server_figures(self.seen)}


def server_figures(seen: Sequence[Observation]) -> dict[str, Any]:
    """Return the figures of a run: the reports of its server, and the use of its processes; without what is not
    known."""
    before, after = seen[0], seen[-1]
    figures: dict[str, float | None] = {
        "cache_hit": server_metrics.cache_hit(before.reading, after.reading),
        "queue_ms": _times(1000, server_metrics.queue_time(before.reading, after.reading)),
        "retracted": increase(before.reading, after.reading, "retracted"),
        "waiting_max": _max(server_metrics.waiting(each.reading) for each in seen),
        "running_max": _max(each.reading.get("running") for each in seen),
        "kv_usage_before": before.reading.get("kv_usage"),
        "kv_usage_max": _max(each.reading.get("kv_usage") for each in seen),
        "kv_usage_after": after.reading.get("kv_usage"),
        "memory_bytes_max": _max(each.processes.memory_bytes for each in seen if each.processes is not None),
        "gpu_load_mean": _mean([each.gpu.load for each in seen if each.gpu is not None]),
        "gpu_memory_bytes_max": _max(each.gpu.memory_bytes for each in seen if each.gpu is not None),
        "cpu_cores": cores(before, after),
    }
    return {name: value for name, value in figures.items() if value is not None}


def cores(before: Observation, after: Observation) -> float | None:
    """Return how many cores the server used between two observations; None if that is not known."""
    if before.processes is None or after.processes is None or after.at <= before.at:
        return None
    return (after.processes.cpu_s - before.processes.cpu_s) / (after.at - before.at)


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _max(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
