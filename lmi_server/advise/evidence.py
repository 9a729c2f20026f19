"""What is known of a server under load: moments of its metrics, and of its log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lmi_server.bench import server_metrics
from lmi_server.bench.observation import Observation
from lmi_server.client.server_calls import increase

_BATCH = re.compile(r"(Prefill|Decode) batch\b(.*)")
_PAIR = re.compile(r"#?([a-z][\w -]*)(?: \([^)]*\))?: (\d+(?:\.\d+)?)")
# SGLang of today says "KV cache pool is full. Retract requests."; the numbers are the same.
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")
_VLLM = re.compile(r"Running: (\d+) reqs, Waiting: (\d+) reqs, .*?KV cache usage: ([\d.]+)%")
_VLLM_HIT = re.compile(r"Prefix cache hit rate: ([\d.]+)%")
_MEMORY_ERROR = re.compile(r"OutOfMemoryError|CUDA out of memory|HIP out of memory")
_RANKS = re.compile(r"\b(?:tp_size|tensor_parallel_size|ranks)=(\d+)")
_FREE_GPU = re.compile(r"\b(?:available_gpu_mem|avail mem)=(\d+(?:\.\d+)?) ?GB")


@dataclass(frozen=True, slots=True)
class LoadSample:
    """One look at a server; None is what it did not say. `in_engine` of the `queued` requests wait in the engine."""

    running: float | None = None
    queued: float | None = None
    in_engine: float | None = None
    usage: float | None = None


@dataclass(slots=True)
class Evidence:
    """All that is known. `engine` is a key of `rules.OPTIONS`; the counts are of the time that was looked at."""

    engine: str = "sglang"
    samples: list[LoadSample] = field(default_factory=list)
    retracted: float = 0.0
    cached_tokens: float = 0.0
    prompt_tokens: float = 0.0
    prefill_memory_errors: int = 0
    decode_memory_errors: int = 0
    ranks: int = 1
    free_gpu_gb: float | None = None

    @property
    def busy(self) -> list[LoadSample]:
        """Return the moments in which requests ran or waited: only these say anything."""
        return [sample for sample in self.samples if sample.running or sample.queued]

    @property
    def cache_hit(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


def add_metrics(evidence: Evidence, seen: Sequence[Observation]) -> None:
    """Add what was seen of /metrics."""
    for each in seen:
        reading = each.reading
        if reading:
            evidence.samples.append(
                LoadSample(
                    reading.get("running"),
                    server_metrics.waiting(reading),
                    reading.get("queued_in_engine"),
                    reading.get("kv_usage"),
                )
            )
    before, after = seen[0].reading, seen[-1].reading
    evidence.retracted += increase(before, after, "retracted") or 0.0
    evidence.cached_tokens += increase(before, after, "cached_tokens") or 0.0
    evidence.prompt_tokens += increase(before, after, "looked_up_tokens") or 0.0


def add_log(evidence: Evidence, lines: Iterable[str]) -> None:
    """Add what a log says: this server's or SGLang's lines about batches, or vLLM's about its engine."""
    is_prefill = False
    for line in lines:
        if (batch := _BATCH.search(line)) is not None:
            is_prefill = batch[1] == "Prefill"
            _add_batch(evidence, is_prefill, {key.strip(): float(value) for key, value in _PAIR.findall(batch[2])})
        elif (vllm := _VLLM.search(line)) is not None:
            _add_vllm(evidence, line, *map(float, vllm.groups()))
        elif (retracted := _RETRACTED.search(line)) is not None:
            evidence.retracted += int(retracted[1])
        elif _MEMORY_ERROR.search(line):
            evidence.prefill_memory_errors += is_prefill
            evidence.decode_memory_errors += not is_prefill
        _add_setup(evidence, line)


def _add_batch(evidence: Evidence, is_prefill: bool, values: dict[str, float]) -> None:
    if is_prefill:
        cached = values.get("cached-token", 0.0)
        evidence.cached_tokens += cached
        evidence.prompt_tokens += cached + values.get("new-token", 0.0)
        return
    queued = values.get("queue-req")
    evidence.samples.append(LoadSample(values.get("running-req"), queued, queued, values.get("token usage")))


def _add_vllm(evidence: Evidence, line: str, running: float, waiting: float, percent: float) -> None:
    evidence.engine = "vllm"
    evidence.samples.append(LoadSample(running, waiting, waiting, percent / 100))
    if (hit := _VLLM_HIT.search(line)) is not None:
        evidence.cached_tokens, evidence.prompt_tokens = float(hit[1]), 100.0


def _add_setup(evidence: Evidence, line: str) -> None:
    if (ranks := _RANKS.search(line)) is not None:
        evidence.ranks = int(ranks[1])
    if (free := _FREE_GPU.search(line)) is not None:
        evidence.free_gpu_gb = float(free[1])
