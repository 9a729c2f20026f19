"""The table of what is counted of a model, and its name in each format.

`spellings.py` writes Prometheus' names: this server's own, vLLM's and DJL Serving's. `embedded_metrics.py` writes
CloudWatch's, and `lmi_logs.py` DJL Serving's as lines of a log. What has no name in a format is not shown there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from frontend.observability.request_record import CLIENT_GONE
from lmi_server.contract.errors import ConfigurationError, HandlerError, LmiServerError, RequestError, ServingError
from lmi_server.serving.pool.worker_pool import WorkerPool

# Upper bounds of buckets, in seconds: from a cached embedding to a long generation.
_DURATIONS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_FIRST_TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60)
_QUEUE_TIMES = (0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120)
_GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_SIZES = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Quantity(NamedTuple):
    """A row of the table. `key` is the name of the value where it is counted, `help` is the text beside its names.

    `bounds` are those of a histogram's buckets. `vllm_help` is the text beside vLLM's name if it differs.
    """

    key: str
    name: str
    help: str
    bounds: Sequence[float] = ()
    vllm: str = ""
    djl_serving: str = ""
    cloudwatch: str = ""
    vllm_help: str = ""


HISTOGRAMS = (
    Quantity(
        "duration", "lmi_request_duration_seconds", "Arrival to the last byte.", _DURATIONS,
        vllm="e2e_request_latency_seconds", djl_serving="RequestLatency", cloudwatch="Duration",
    ),
    Quantity("first_byte", "lmi_time_to_first_byte_seconds", "Arrival to the first byte.", _FIRST_TIMES),
    Quantity(
        "queue", "lmi_queue_time_seconds", "Time in the job queue.", _QUEUE_TIMES,
        vllm="request_queue_time_seconds", djl_serving="QueueTime", cloudwatch="QueueTime",
    ),
    Quantity(
        "first_token", "lmi_time_to_first_token_seconds", "Arrival to the first token.", _FIRST_TIMES,
        vllm="time_to_first_token_seconds", cloudwatch="TimeToFirstToken",
    ),
    Quantity(
        "prefill", "lmi_prefill_seconds", "A worker's start to the first token.", _FIRST_TIMES,
        vllm="request_prefill_time_seconds",
    ),
    Quantity(
        "decode", "lmi_decode_seconds", "First to last token.", _DURATIONS, vllm="request_decode_time_seconds"
    ),
    Quantity(
        "token_gap", "lmi_inter_token_latency_seconds",
        "Time from token to token: each token counts with the mean of its request.", _GAPS,
        vllm="inter_token_latency_seconds", vllm_help="Time from token to token.", cloudwatch="InterTokenLatency",
    ),
    Quantity(
        "time_per_token", "", "Mean time from token to token of a request.", _GAPS,
        vllm="request_time_per_output_token_seconds",
    ),
    Quantity(
        "prompt_tokens", "lmi_request_prompt_tokens", "Tokens of the prompt of a request.", _SIZES,
        vllm="request_prompt_tokens",
    ),
    Quantity(
        "output_tokens", "lmi_request_output_tokens", "Tokens generated for a request.", _SIZES,
        vllm="request_generation_tokens",
    ),
)  # fmt: skip
"""Of requests: the keys of `ModelMetrics.histograms`."""

TOKENS = (
    Quantity(
        "prompt_tokens", "lmi_prompt_tokens", "Tokens of prompts.", vllm="prompt_tokens", cloudwatch="PromptTokens"
    ),
    Quantity("prompt_tokens", "", "Tokens of prompts, as looked up.", vllm="prefix_cache_queries"),
    Quantity(
        "cached_tokens", "lmi_cached_prompt_tokens", "Tokens of prompts whose KV cache was reused.",
        vllm="prefix_cache_hits",
    ),
    Quantity(
        "output_tokens", "lmi_output_tokens", "Generated tokens.", vllm="generation_tokens", cloudwatch="OutputTokens"
    ),
)  # fmt: skip
"""Counters by adapter: the attributes of `AdapterCounts`."""

POOL_GAUGES = (
    Quantity("dispatcher.queued", "lmi_queue_depth", "Requests that wait for a worker.", cloudwatch="QueueDepth"),
    Quantity(
        "dispatcher.in_flight", "lmi_requests_in_flight", "Requests that workers hold.", cloudwatch="RequestsInFlight"
    ),
    Quantity("roster.ready_workers", "lmi_workers_ready", "Workers that can serve.", cloudwatch="WorkersReady"),
)
"""The attributes of `WorkerPool`, as those of the next two."""

POOL_COUNTERS = (
    Quantity("members.deaths", "lmi_worker_deaths", "Workers that ended unasked."),
    Quantity("dispatcher.recovery.retries", "lmi_requests_retried", "Requests that were sent to a worker again."),
)
POOL_HISTOGRAMS = (
    Quantity(
        "dispatcher.batch_sizes", "lmi_batch_size",
        "Requests of a batch; without batches, the requests of a worker at the arrival of each.",
    ),
    Quantity("members.load_times", "lmi_model_load_seconds", "Start of a worker's process to its loaded model."),
)  # fmt: skip


class VllmFigure(NamedTuple):
    """What vLLM reports of a pool, from the pool and the sums of its handlers' gauges; None if these do not have it."""

    name: str
    help: str
    read: Callable[[WorkerPool, Mapping[str, float]], float | None]


def _cache_usage(pool: WorkerPool, gauges: Mapping[str, float]) -> float | None:
    """Return the mean of the workers."""
    used = gauges.get("kv_cache_usage")
    return None if used is None else used / max(pool.roster.ready_workers, 1)


VLLM_GAUGES = (
    VllmFigure(
        "num_requests_running",
        "Requests that are computed.",
        lambda pool, gauges: gauges.get("running_requests", pool.dispatcher.in_flight),
    ),
    VllmFigure(
        "num_requests_waiting",
        "Requests that wait.",
        lambda pool, gauges: pool.dispatcher.queued + gauges.get("waiting_requests", 0),
    ),
    VllmFigure("kv_cache_usage_perc", "Share of the KV cache in use, 1 for all.", _cache_usage),
)
VLLM_COUNTERS = (
    VllmFigure(
        "num_preemptions",
        "Requests that were taken out of the batch to make room.",
        lambda pool, gauges: gauges.get("retracted_requests_total"),
    ),
)
VLLM_FINISH_REASONS = {
    "eos_token": "stop", "stop_sequence": "stop", "length": "length", "cancelled": "abort", "error": "error"
}  # fmt: skip

DJL_RESPONSES = ("Response_2XX", "Response_4XX", "Response_5XX")
DJL_ERRORS = ("WlmError", "ServerError")
DJL_NAMES = {*DJL_RESPONSES, *DJL_ERRORS, *(row.djl_serving for row in HISTOGRAMS if row.djl_serving)}


def djl_response(code: int) -> str | None:
    """Return DJL Serving's counter of answers with this status; None if the client was gone and got none."""
    if code == CLIENT_GONE:
        return None
    return DJL_RESPONSES[0 if code < 400 else 1 if code < 500 else 2]


def djl_error(error: LmiServerError) -> str | None:
    """Return DJL Serving's counter of an error: WlmError if no worker could take or keep the request, or ServerError.

    None for errors of the client, the configuration and the handler, which it counts nowhere.
    """
    if isinstance(error, RequestError | ConfigurationError | HandlerError):
        return None
    return "WlmError" if isinstance(error, ServingError) else "ServerError"
