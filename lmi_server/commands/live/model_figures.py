"""The figures of a server's models at one moment, and their rates between two: rates and percentiles."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from lmi_server.client.server_calls import ServerCalls, increase, samples_in
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.histogram import quantile

_FIRST_TOKEN = "lmi_time_to_first_token_seconds"
_TOKEN_GAP = "lmi_inter_token_latency_seconds"
_WORKERS = "lmi_workers"
_KV_USAGE = ("lmi_handler_kv_cache_usage", "vllm:kv_cache_usage_perc")
# Of several names the first that a model has counts: handlers count tokens as they come, the front end at the end.
_GENERATED = ("lmi_handler_generated_tokens_total", "vllm:generation_tokens_total", "lmi_output_tokens_total")
_PLAIN = ("lmi_queue_depth", "lmi_requests_in_flight", "lmi_worker_resident_memory_bytes")
_PROMPT, _CACHED = "lmi_prompt_tokens_total", "lmi_cached_prompt_tokens_total"
_NAMES = (_FIRST_TOKEN, _TOKEN_GAP, _WORKERS, *_KV_USAGE, *_GENERATED, *_PLAIN, _PROMPT, _CACHED)

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at a server, at a time.monotonic(); everything is by the label of a model.

    `values` are sums over workers, by name; of `_KV_USAGE` they are the highest of any worker. `buckets` are those of
    histograms, by name: how many values are not above each bound.
    """

    at: float
    states: Mapping[str, str]
    workers: Mapping[str, Mapping[str, int]]
    values: Mapping[str, Mapping[str, float]]
    buckets: Mapping[str, Mapping[str, Mapping[float, float]]]


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """What is shown of a model; times are in seconds, and None is what is not known."""

    label: str
    state: str
    workers: Mapping[str, int]
    running: float
    queued: float
    tokens_per_s: float | None
    first_token_s: Sequence[float | None]
    token_gap_s: Sequence[float | None]
    kv_usage: float | None
    prefix_hits: float | None
    memory_bytes: float | None


SHARES = (0.5, 0.95)
"""The percentiles of `first_token_s` and `token_gap_s`."""


def take_snapshot(server: ServerCalls) -> Snapshot:
    """Return what a server says now. Raises ConfigurationError if it does not answer, or is not lmi-server."""
    states = dict(_states(server))
    text = server.text(f"/metrics?{urlencode([('name[]', name) for name in _NAMES])}", _LIMIT_S)
    return parse(text, states, time.monotonic())


def _states(server: ServerCalls) -> Iterator[tuple[str, str]]:
    token: str | None = "0"
    while token is not None:
        page = server.json("GET", f"/models?next_page_token={token}", _LIMIT_S)
        if not isinstance(page, dict) or "models" not in page:
            raise ConfigurationError(f"{server.url}/models lists no models; is it lmi-server?")
        for row in page["models"]:
            yield ":".join(filter(None, (row["modelName"], row.get("version")))), row["status"]
        token = page.get("nextPageToken")


def parse(text: str, states: Mapping[str, str], at: float) -> Snapshot:
    """Return the look of a text of /metrics."""
    workers: dict[str, dict[str, int]] = defaultdict(dict)
    values: dict[str, dict[str, float]] = defaultdict(dict)
    buckets: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for name, written, value in samples_in(text.splitlines()):
        labels = {name: _unescape(value) for name, value in _LABEL.findall(written)}
        model = labels.get("model", "")
        if name == _WORKERS:
            workers[model][labels["state"]] = int(value)
        elif "le" in labels:
            buckets[name.removesuffix("_bucket")][model][float(labels["le"])] = value
        elif name in _KV_USAGE:
            values[name][model] = max(value, values[name].get(model, 0.0))
        else:
            values[name][model] = value + values[name].get(model, 0.0)
    return Snapshot(at, states, workers, values, buckets)


def _unescape(value: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], value) if "\\" in value else value


def figures(now: Snapshot, a_moment_ago: Snapshot | None, long_ago: Snapshot | None) -> list[ModelFigures]:
    """Return the figures of every model, the busiest first.

    Rates are those since `a_moment_ago`; percentiles and hits those since `long_ago`, or since the server began.
    """
    found = [_figures_of(label, now, a_moment_ago, long_ago) for label in now.states]
    return sorted(found, key=lambda each: (-(each.running + each.queued), -(each.tokens_per_s or 0.0), each.label))


def _figures_of(label: str, now: Snapshot, a_moment_ago: Snapshot | None, long_ago: Snapshot | None) -> ModelFigures:
    def value(name: str) -> float | None:
        return now.values.get(name, {}).get(label)

    return ModelFigures(
        label,
        now.states[label],
        now.workers.get(label, {}),
        value("lmi_requests_in_flight") or 0.0,
        value("lmi_queue_depth") or 0.0,
        _rate(label, now, a_moment_ago),
        _percentiles(_FIRST_TOKEN, label, now, long_ago),
        _percentiles(_TOKEN_GAP, label, now, long_ago),
        next((found for name in _KV_USAGE if (found := value(name)) is not None), None),
        _hits(label, now, long_ago),
        value("lmi_worker_resident_memory_bytes"),
    )


def _rate(label: str, now: Snapshot, before: Snapshot | None) -> float | None:
    """Return the tokens per second; None if nothing counts tokens, or there is no earlier look."""
    if before is None or now.at <= before.at:
        return None
    for name in _GENERATED:
        grown = _increase(name, label, now, before)
        if grown is not None:
            return grown / (now.at - before.at)
    return None


def _hits(label: str, now: Snapshot, before: Snapshot | None) -> float | None:
    """Return the share of the tokens of prompts that a cache had; None if there were no prompts."""
    prompts, cached = _increase(_PROMPT, label, now, before), _increase(_CACHED, label, now, before)
    return cached / prompts if prompts and cached is not None else None


def _increase(name: str, label: str, now: Snapshot, before: Snapshot | None) -> float | None:
    """Return by how much a value has grown; from 0 if there is no earlier look."""
    return increase({} if before is None else before.values.get(name, {}), now.values.get(name, {}), label)


def _percentiles(name: str, label: str, now: Snapshot, before: Snapshot | None) -> tuple[float | None, ...]:
    """Return the percentiles of what a histogram has counted since an earlier look."""
    reached = now.buckets.get(name, {}).get(label, {})
    earlier = {} if before is None else before.buckets.get(name, {}).get(label, {})
    bounds = sorted(reached)
    grown = [reached[bound] - earlier.get(bound, 0.0) for bound in bounds]
    if grown and grown[-1] < 0:  # the server has started again
        grown = [reached[bound] for bound in bounds]
    counts = [round(each - below) for each, below in zip(grown, [0.0, *grown], strict=False)]
    return tuple(quantile(bounds[:-1], counts, share) for share in SHARES)
