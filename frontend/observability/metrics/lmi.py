"""The metrics of the server under LMI's names, beside its own names.

What the relay counts for `lmi_requests_total` and the histograms is shown a second time under the names that dashboards
of DJL Serving ask for; nothing is counted twice. What models print, and what their loading yields, is kept here.
"""

from __future__ import annotations

import logging
import re
import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily
from prometheus_client.core import Metric as Family

from frontend.observability.metrics.families import histogram
from lmi_server.contract.errors import ConfigurationError, HandlerError, LmiServerError, RequestError, ServingError
from lmi_server.contract.histogram import Histogram
from lmi_server.contract.metrics import COUNTER, GAUGE, HISTOGRAM, Metric

logger = logging.getLogger(__name__)

HOST = socket.gethostname()
CLIENT_GONE = 499
"""The status, in the metrics alone, of a request whose client went away before its answer."""

_MICROSECONDS = 1e6
_UNITS = {"Microseconds": _MICROSECONDS, "Milliseconds": 1e3, "Seconds": 1.0}  # in one second
# For histograms that models print: seconds, from a cached embedding to a long generation; or counts.
_TIMES = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_COUNTS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000)
_MAX_SERIES = 2000  # that models may make: each takes memory for as long as the server runs
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
_RESPONSES = ("Response_2XX", "Response_4XX", "Response_5XX")
_ERRORS = ("WlmError", "ServerError")
_OWN = {*_RESPONSES, *_ERRORS, "RequestLatency", "QueueTime"}

_Labels = tuple[tuple[str, str], ...]


class Counted(Protocol):
    """What is counted of the requests of one model."""

    name: str
    duration: Histogram
    queue: Histogram


class LmiMetrics:
    """LMI's families: those of the server and its models, and those that models print."""

    def __init__(self) -> None:
        self._errors: dict[str, int] = dict.fromkeys(_ERRORS, 0)
        self._recorded: dict[str, _Recorded] = {}
        self._series: Counter[str] = Counter()  # by the model that made them
        self._refused: set[str] = set()  # names about which a warning was logged

    def failed(self, error: LmiServerError) -> Metric | None:
        """Count an error of the server; return LMI's metric for it, None if LMI counts none."""
        name = _error_name(error)
        if name is None:
            return None
        self._errors[name] += 1
        return Metric(name, "Count", 1, (("Host", HOST),))

    def record(self, metric: Metric) -> None:
        """Add a value to the family of its name. A value that cannot be shown there is dropped, with a warning."""
        name = family_name(metric.name)
        family = self._recorded.get(name)
        if family is None:
            family = _Recorded(name, metric)
        labels = _labels(metric)
        reason = self._obstacle(family, metric, is_new=labels not in family.values)
        if reason is not None:
            self._warn(metric.name, reason)
            return
        self._series[metric.model] += labels not in family.values
        self._recorded[name] = family
        family.add(labels, metric.value)

    def _obstacle(self, family: _Recorded, metric: Metric, is_new: bool) -> str | None:
        if family.name in _OWN or family.name.startswith("lmi_"):
            return "the server has a metric of that name; choose another"
        if family.kind != kind_of(metric):
            return "its first value was of another kind; use one of c, g and h for all"
        if family.kind == COUNTER and metric.value < 0:
            return "a counter cannot fall; print it as a gauge, with |g at the end"
        if is_new and self._series[metric.model] >= self._share(metric.model):
            count = self._series.total()
            return f"there are {count} series already, of at most {_MAX_SERIES}; print fewer names and dimensions"
        return None

    def _share(self, model: str) -> int:
        """Return how many series a model may have: as many as are left, so that none can take the room of all others.

        The server itself, whose names and dimensions are few, may have all.
        """
        left = _MAX_SERIES - self._series.total()
        return left if model else _MAX_SERIES

    def _warn(self, name: str, reason: str) -> None:
        if name not in self._refused and len(self._refused) < _MAX_SERIES:
            self._refused.add(name)
            logger.warning("metric %s is not counted: %s", name, reason)

    def families(self, responses: Mapping[int, int], models: Iterable[Counted]) -> Iterator[Family]:
        """Yield the families of requests. `responses` has the number of answers by status code."""
        yield from _response_families(responses)
        for name, count in self._errors.items():
            yield _host_counter(name, count)
        by_name: dict[str, list[Counted]] = defaultdict(list)
        for model in models:
            by_name[model.name].append(model)
        yield _latencies("RequestLatency", {name: [m.duration for m in all_] for name, all_ in by_name.items()})
        yield _latencies("QueueTime", {name: [m.queue for m in all_] for name, all_ in by_name.items()})

    def recorded(self) -> Iterator[Family]:
        """Yield what models print and what their loading yields."""
        for family in self._recorded.values():
            yield family.family()


class _Recorded:
    """One family of recorded values, by labels."""

    def __init__(self, name: str, first: Metric) -> None:
        self.name = name
        self.kind = kind_of(first)
        self.values: dict[_Labels, float] = {}
        self._unit = first.unit
        self._histograms: dict[_Labels, Histogram] = {}

    def add(self, labels: _Labels, value: float) -> None:
        if self.kind == GAUGE:
            self.values[labels] = value
            return
        self.values[labels] = self.values.get(labels, 0.0) + value
        if self.kind == HISTOGRAM:
            self._histogram(labels).observe(value)

    def _histogram(self, labels: _Labels) -> Histogram:
        if labels not in self._histograms:
            scale = _UNITS.get(self._unit)
            bounds = _COUNTS if scale is None else [round(bound * scale, 9) for bound in _TIMES]
            self._histograms[labels] = Histogram(bounds)
        return self._histograms[labels]

    def family(self) -> Family:
        family = Family(
            self.name, f"Unit: {self._unit}.", {COUNTER: "counter", GAUGE: "gauge"}.get(self.kind, "histogram")
        )
        for labels, value in self.values.items():
            if self.kind == HISTOGRAM:
                _add_histogram(family, dict(labels), self._histograms[labels])
            else:
                family.add_sample(self.name + ("_total" if self.kind == COUNTER else ""), dict(labels), value)
        return family


def _add_histogram(family: Family, labels: dict[str, str], histogram: Histogram) -> None:
    for bound, count in histogram.cumulative():
        family.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, count)
    family.add_sample(f"{family.name}_count", labels, sum(histogram.counts))
    family.add_sample(f"{family.name}_sum", labels, histogram.sum)


def kind_of(metric: Metric) -> str:
    """Return the kind of a metric; one that says none is a counter if its unit is Count, as in LMI."""
    return metric.kind or (COUNTER if metric.unit == "Count" else GAUGE)


def family_name(name: str) -> str:
    """Return the name that Prometheus takes, without the `_total` that it adds to that of a counter."""
    clean = _NOT_A_NAME.sub("_", name).removesuffix("_total")
    return f"_{clean}" if clean[:1].isdigit() or not clean else clean


def _labels(metric: Metric) -> _Labels:
    pairs = metric.dimensions or (("Host", HOST),)
    return tuple(sorted({_label_name(name): value for name, value in pairs}.items()))


def _label_name(name: str) -> str:
    clean = _NOT_A_NAME.sub("_", name)
    if clean.startswith("__"):  # Prometheus keeps such labels to itself
        return f"_{clean.lstrip('_')}"
    return f"_{clean}" if clean[:1].isdigit() or clean == "le" else clean


def _error_name(error: LmiServerError) -> str | None:
    """Return LMI's counter: WlmError if no worker could take or keep the request, ServerError for other 5xx."""
    if isinstance(error, RequestError | ConfigurationError | HandlerError):
        return None
    return "WlmError" if isinstance(error, ServingError) else "ServerError"


def _response_families(responses: Mapping[int, int]) -> Iterator[Family]:
    by_name: Counter[str] = Counter(dict.fromkeys(_RESPONSES, 0))
    for code, count in responses.items():
        name = response_name(code)
        if name is not None:
            by_name[name] += count
    for name, count in by_name.items():
        yield _host_counter(name, count)


def response_name(code: int) -> str | None:
    """Return LMI's counter of answers with this status; None if the client was gone and got none."""
    if code == CLIENT_GONE:
        return None
    return _RESPONSES[0 if code < 400 else 1 if code < 500 else 2]


def _host_counter(name: str, count: int) -> Family:
    family = CounterMetricFamily(name, "Unit: Count.", labels=("Host",))
    family.add_metric((HOST,), count)
    return family


def _latencies(name: str, histograms: Mapping[str, list[Histogram]]) -> Family:
    """Return a family in microseconds by the name of the model; all versions of a model count together."""
    totals = {}
    for model, versions in histograms.items():
        totals[model] = Histogram(versions[0].bounds)
        for each in versions:
            totals[model].add(each)
    return histogram(name, "Unit: Microseconds.", totals, "Model", _MICROSECONDS)
