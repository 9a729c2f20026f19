"""The figures of a server on /metrics, in Prometheus' text format, under the names of known servers.

These are this server's own names and those of vLLM (docs.vllm.ai, "Production Metrics"), SGLang (docs.sglang.io,
"Production Metrics") and text-generation-inference ("Metrics").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from urllib.request import Request

from lmi_server.client.bounded_requests import open_within, read_whole
from lmi_server.client.server_calls import increase, samples_in

_BUCKET = "_bucket{"
_VLLM = "vllm:"
_WORKER = 'worker="'
_LIMIT_S = 5.0

Reading = Mapping[str, float]
"""Values of a moment by keys of QUANTITIES; a key is missing if the server does not report it."""


@dataclass(frozen=True, slots=True)
class _Quantity:
    """The names that servers have for one value, and how the samples of several workers become one."""

    names: tuple[str, ...]
    total: Callable[[Sequence[float]], float] = sum


QUANTITIES: Mapping[str, _Quantity] = {
    "running": _Quantity(
        (
            "lmi_handler_running_requests",
            "vllm:num_requests_running",
            "sglang:num_running_reqs",
            "tgi_batch_current_size",
            "lmi_requests_in_flight",
        )
    ),
    "queued": _Quantity(("lmi_queue_depth", "sglang:num_queue_reqs", "tgi_queue_size")),
    "queued_in_engine": _Quantity(("lmi_handler_waiting_requests", "vllm:num_requests_waiting")),
    "kv_usage": _Quantity(
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "lmi_handler_kv_cache_usage"),
        lambda values: sum(values) / len(values),
    ),
    "cached_tokens": _Quantity(
        ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total", "lmi_cached_prompt_tokens_total")
    ),
    "looked_up_tokens": _Quantity(
        ("vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total", "lmi_prompt_tokens_total")
    ),
    "generated_tokens": _Quantity(
        (
            "vllm:generation_tokens_total",
            "sglang:generation_tokens_total",
            "lmi_handler_generated_tokens_total",
            "tgi_request_generated_tokens_sum",
        )
    ),
    "retracted": _Quantity(
        ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total", "lmi_handler_retracted_requests_total")
    ),
    "queue_s": _Quantity(
        ("lmi_queue_time_seconds_sum", "sglang:queue_time_seconds_sum", "tgi_request_queue_duration_sum")
    ),
    "queue_count": _Quantity(
        ("lmi_queue_time_seconds_count", "sglang:queue_time_seconds_count", "tgi_request_queue_duration_count")
    ),
    "engine_queue_s": _Quantity(("vllm:request_queue_time_seconds_sum",)),
    "engine_queue_count": _Quantity(("vllm:request_queue_time_seconds_count",)),
}
"""The values that are read; of several names that a server has, the first one counts."""


def read(text: str) -> Reading:
    """Return the values in a text of /metrics.

    Of this server's text, vLLM's names count only where vLLM reports them: elsewhere they repeat values that this
    server has under its own names, and count requests in the job queue as waiting.
    """
    samples: dict[str, list[float]] = defaultdict(list)
    is_own = is_lmi_server(text)
    for name, labels, value in samples_in(line for line in text.splitlines() if _BUCKET not in line):
        if not (is_own and name.startswith(_VLLM) and _WORKER not in labels):
            samples[name].append(value)
    found = {}
    for key, quantity in QUANTITIES.items():
        known = [name for name in quantity.names if name in samples]
        if known:
            found[key] = quantity.total(samples[known[0]])
    return found


def is_lmi_server(text: str) -> bool:
    """Return whether a text of /metrics is of this server."""
    return "lmi_queue_depth" in text


def reports_vllm(text: str) -> bool:
    """Return whether vLLM serves a model behind a text of /metrics.

    This server shows the values of every handler under vLLM's names. Only what comes from vLLM has a worker there.
    """
    is_own = is_lmi_server(text)
    return any(
        name.startswith(_VLLM) and (not is_own or _WORKER in labels)
        for name, labels, _ in samples_in(text.splitlines())
    )


def fetch(url: str, headers: Mapping[str, str]) -> Reading:
    """Return the values at a URL. Raises what `fetch_text` raises."""
    return read(fetch_text(url, headers))


def fetch_text(url: str, headers: Mapping[str, str]) -> str:
    """Return the text at a URL. Raises OSError if it cannot be read, ValueError if the answer is not text."""
    try:
        with open_within(_LIMIT_S, Request(url, headers=dict(headers))) as answer:
            return read_whole(answer).decode()
    except HTTPException as error:  # what is there does not speak HTTP
        raise ConnectionError(str(error)) from error


def cache_hit(before: Reading, after: Reading) -> float | None:
    """Return the share of prompt tokens that the prefix cache had between two readings; None if it is not known."""
    cached = increase(before, after, "cached_tokens")
    looked_up = increase(before, after, "looked_up_tokens")
    return cached / looked_up if cached is not None and looked_up else None


def queue_time(before: Reading, after: Reading) -> float | None:
    """Return the mean seconds for which a request waited, before and in the engine; None if that is not known."""
    means = [
        seconds / count
        for prefix in ("", "engine_")
        if (count := increase(before, after, f"{prefix}queue_count"))
        and (seconds := increase(before, after, f"{prefix}queue_s")) is not None
    ]
    return sum(means) if means else None


def waiting(reading: Reading) -> float | None:
    """Return the requests that wait, before and in the engine; None if that is not known."""
    counts = [reading[key] for key in ("queued", "queued_in_engine") if key in reading]
    return sum(counts) if counts else None
