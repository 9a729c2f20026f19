"""The metrics of a model under vLLM's names, for dashboards that were made for vLLM.

A model that vLLM itself serves reports its own, which `engine_metrics.py` repeats; this is for all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric as Family

from frontend.observability.metrics.families import counter, gauge, histogram
from frontend.observability.metrics.model_metrics import ModelMetrics
from lmi_server.serving.pool.worker_pool import WorkerPool

# What vLLM calls the end of a request.
_REASONS = {"eos_token": "stop", "stop_sequence": "stop", "length": "length", "cancelled": "abort", "error": "error"}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to the first token.", "first_token"),
    "inter_token_latency_seconds": ("Time from token to token.", "token_gap"),
    "request_time_per_output_token_seconds": ("Mean time from token to token of a request.", "time_per_token"),
    "e2e_request_latency_seconds": ("Arrival to the last byte.", "duration"),
    "request_queue_time_seconds": ("Time in the job queue.", "queue"),
    "request_prefill_time_seconds": ("A worker's start to the first token.", "prefill"),
    "request_decode_time_seconds": ("First to last token.", "decode"),
    "request_prompt_tokens": ("Tokens of the prompt of a request.", "prompt_tokens"),
    "request_generation_tokens": ("Tokens generated for a request.", "output_tokens"),
}
_LABEL = ("model_name",)


def vllm_families(metrics: ModelMetrics, pool: WorkerPool) -> Iterator[Family]:
    """Yield the families of one model; its label is `model_name`, as vLLM has it."""
    key = (metrics.name,)
    gauges = _summed(pool)
    running = gauges.get("running_requests", float(pool.dispatcher.in_flight))
    waiting = pool.dispatcher.queued + gauges.get("waiting_requests", 0.0)
    yield gauge("vllm:num_requests_running", "Requests that are computed.", _LABEL, [(key, running)])
    yield gauge("vllm:num_requests_waiting", "Requests that wait.", _LABEL, [(key, waiting)])
    if "kv_cache_usage" in gauges:
        usage = gauges["kv_cache_usage"] / max(len(pool.roster.ready), 1)
        yield gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 1 for all.", _LABEL, [(key, usage)])
    for name, (text, attribute) in _HISTOGRAMS.items():
        yield histogram(f"vllm:{name}", text, {metrics.name: getattr(metrics, attribute)}, "model_name")
    if "retracted_requests_total" in gauges:
        text = "Requests that were taken out of the batch to make room."
        yield counter("vllm:num_preemptions", text, _LABEL, [(key, gauges["retracted_requests_total"])])
    yield from _token_counters(metrics)
    yield _ended(metrics)


def _token_counters(metrics: ModelMetrics) -> Iterator[Family]:
    counts = metrics.adapters.values()
    key = (metrics.name,)
    prompts, cached = sum(each.prompt_tokens for each in counts), sum(each.cached_tokens for each in counts)
    yield counter("vllm:prompt_tokens", "Tokens of prompts.", _LABEL, [(key, prompts)])
    yield counter("vllm:prefix_cache_queries", "Tokens of prompts, as looked up.", _LABEL, [(key, prompts)])
    yield counter("vllm:prefix_cache_hits", "Tokens of prompts whose KV cache was reused.", _LABEL, [(key, cached)])
    generated = sum(each.output_tokens for each in counts)
    yield counter("vllm:generation_tokens", "Generated tokens.", _LABEL, [(key, generated)])


def _ended(metrics: ModelMetrics) -> Family:
    reasons: Counter[str] = Counter()
    for counts in metrics.adapters.values():
        for reason, count in counts.reasons.items():
            reasons[_REASONS[reason]] += count
    labelled = [((metrics.name, reason), count) for reason, count in reasons.items()]
    return counter("vllm:request_success", "Requests by how they ended.", ("model_name", "finished_reason"), labelled)


def _summed(pool: WorkerPool) -> Counter[str]:
    """Return the gauges of the handler, summed over the workers."""
    total: Counter[str] = Counter()
    for gauges in pool.roster.gauges.values():
        for name, value in gauges.items():
            total[name] += value  # type: ignore[assignment]
    return total
