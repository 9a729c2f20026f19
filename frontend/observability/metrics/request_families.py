"""The families of requests, tokens and times, by model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric as Family

from frontend.observability.metrics.families import counter, histogram
from frontend.observability.metrics.model_metrics import ModelMetrics
from lmi_server.contract.histogram import Histogram


def request_families(series: Mapping[str, ModelMetrics], unrouted: ModelMetrics) -> Iterator[Family]:
    """Yield what is counted of the requests of each model, and under the label "" of those that reached none."""
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
    yield histogram("lmi_request_duration_seconds", "Arrival to the last byte.", _each(series, "duration"))
    yield histogram("lmi_time_to_first_byte_seconds", "Arrival to the first byte.", _each(series, "first_byte"))
    yield histogram("lmi_queue_time_seconds", "Time in the job queue.", _each(series, "queue"))
    yield histogram("lmi_time_to_first_token_seconds", "Arrival to the first token.", _each(series, "first_token"))
    yield histogram("lmi_prefill_seconds", "A worker's start to the first token.", _each(series, "prefill"))
    yield histogram("lmi_decode_seconds", "First to last token.", _each(series, "decode"))
    yield histogram(
        "lmi_inter_token_latency_seconds",
        "Time from token to token: each token counts with the mean of its request.",
        _each(series, "token_gap"),
    )
    yield histogram("lmi_request_prompt_tokens", "Tokens of the prompt of a request.", _each(series, "prompt_tokens"))
    yield histogram("lmi_request_output_tokens", "Tokens generated for a request.", _each(series, "output_tokens"))
    yield from _adapter_families(series)


def _each(series: Mapping[str, ModelMetrics], name: str) -> dict[str, Histogram]:
    return {label: getattr(model, name) for label, model in series.items()}


def _adapter_families(series: Mapping[str, ModelMetrics]) -> Iterator[Family]:
    counts = [((label, adapter), each) for label, model in series.items() for adapter, each in model.adapters.items()]
    labels = ("model", "adapter")
    yield counter(
        "lmi_requests_finished",
        "Requests of text generation by how they ended.",
        (*labels, "finish_reason"),
        [((*key, reason), count) for key, each in counts for reason, count in each.reasons.items()],
    )
    yield counter(
        "lmi_prompt_tokens", "Tokens of prompts.", labels, [(key, each.prompt_tokens) for key, each in counts]
    )
    yield counter(
        "lmi_cached_prompt_tokens",
        "Tokens of prompts whose KV cache was reused.",
        labels,
        [(key, each.cached_tokens) for key, each in counts],
    )
    yield counter("lmi_output_tokens", "Generated tokens.", labels, [(key, each.output_tokens) for key, each in counts])
