"""The rules of `lmi-server advise`: each reads the evidence, and says with figures what to change and who says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lmi_server.advise.evidence import Evidence, LoadSample

SGLANG = 'SGLang, "Hyperparameter Tuning"'
VLLM = 'vLLM, "Optimization and Tuning": preemption'
OWN = "docs/overload.md"

OFTEN = 0.5
"""The share of moments from which on something counts as frequent; SGLang's guide names no number."""

_USED_WELL = 0.9
_HEALTHY_QUEUE = 500
_RETRACTIONS_OFTEN = 0.1  # per moment
_HIT = 0.01
_ROOM = 0.5  # of the KV cache in use, below which another copy of the model has room
_FREE_GPU_GB = 10.0


@dataclass(frozen=True, slots=True)
class OptionNames:
    """What an engine calls its settings. Without a scheduler that reserves, `conservativeness` is None."""

    running: str
    chunk: str
    memory: str
    replicas: str
    policy: str | None = None
    conservativeness: str | None = None


OPTIONS: Mapping[str, OptionNames] = {
    "sglang": OptionNames(
        "--max-running-requests",
        "--chunked-prefill-size",
        "--mem-fraction-static",
        "--dp-size",
        "--schedule-policy",
        "--schedule-conservativeness",
    ),
    "vllm": OptionNames(
        "--max-num-seqs", "--max-num-batched-tokens", "--gpu-memory-utilization", "--data-parallel-size"
    ),
    "lmi": OptionNames(
        "option.max_rolling_batch_size",
        "option.chunked_prefill_size",
        "option.mem_fraction_static",
        "minWorkers",
        "option.schedule_policy",
        "option.schedule_conservativeness",
    ),
    "lmi-vllm": OptionNames(
        "option.max_rolling_batch_size",
        "option.max_rolling_batch_prefill_tokens",
        "option.gpu_memory_utilization",
        "minWorkers",
    ),
}
"""The settings by engine: SGLang, vLLM, this server with the rolling batch, and this server with vLLM."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What was seen, what to do about it, and its source."""

    finding: str
    remedy: str
    source: str


Rule = Callable[[Evidence, OptionNames], Advice | None]


def advise(evidence: Evidence) -> list[Advice]:
    """Return what all rules say."""
    options = OPTIONS[evidence.engine]
    return [advice for rule in RULES if (advice := rule(evidence, options)) is not None]


def no_load(evidence: Evidence, options: OptionNames) -> Advice | None:
    if evidence.busy:
        return None
    finding = f"no request ran or waited at {len(evidence.samples)} looks"
    return Advice(finding, "look while the load is on; the other rules need a busy server", SGLANG)


def empty_queue(evidence: Evidence, options: OptionNames) -> Advice | None:
    share = _share(evidence.busy, lambda sample: sample.queued == 0)
    if share < OFTEN:
        return None
    finding = f"the queue was empty at {share:.0%} of {len(evidence.busy)} looks"
    return Advice(
        finding, "send more requests at a time: the clients limit the throughput (healthy: 50 to 500 wait)", SGLANG
    )


def long_queue(evidence: Evidence, options: OptionNames) -> Advice | None:
    share = _share(evidence.busy, lambda sample: (sample.in_engine or 0) > _HEALTHY_QUEUE)
    if share < OFTEN:
        return None
    finding = f"more than {_HEALTHY_QUEUE} requests waited in the engine at {share:.0%} of {len(evidence.busy)} looks"
    policy = f", or set {options.policy} to fcfs" if options.policy else ""
    return Advice(finding, f"send fewer at a time{policy}: to sort a long queue costs time", SGLANG)


def unused_cache(evidence: Evidence, options: OptionNames) -> Advice | None:
    """The engine holds requests back although its KV cache has room."""
    share = _share(evidence.busy, lambda sample: bool(sample.in_engine) and _usage(sample) < _USED_WELL)
    if share < OFTEN:
        return None
    finding = f"requests waited in the engine while the KV cache was less than 90 % full at {share:.0%} of the looks"
    if options.conservativeness is None:
        return Advice(finding, f"raise {options.running}", VLLM)
    return Advice(finding, f"lower {options.conservativeness}, to 0.3 for example, or raise {options.running}", SGLANG)


def full_workers(evidence: Evidence, options: OptionNames) -> Advice | None:
    """Requests wait before the engine, which could take more."""

    def waits_outside(sample: LoadSample) -> bool:
        return (sample.queued or 0) > 0 and sample.in_engine == 0 and _usage(sample) < _USED_WELL

    share = _share(evidence.busy, waits_outside)
    if share < OFTEN:
        return None
    running = max(sample.running or 0 for sample in evidence.busy)
    finding = (
        f"requests waited for a worker at {share:.0%} of the looks; {running:.0f} ran at most,"
        " and the KV cache had room"
    )
    return Advice(finding, f"raise {options.running}", OWN)


def retractions(evidence: Evidence, options: OptionNames) -> Advice | None:
    """A few are fine: they show that the memory is used."""
    looks = len(evidence.busy)
    if not looks or evidence.retracted < _RETRACTIONS_OFTEN * looks:
        return None
    finding = f"{evidence.retracted:.0f} requests lost their place in the KV cache at {looks} looks"
    if options.conservativeness is None:
        return Advice(finding, f"raise {options.memory}, or lower {options.running}", VLLM)
    return Advice(finding, f"raise {options.conservativeness}, to 1.3 for example", SGLANG)


def prefill_memory(evidence: Evidence, options: OptionNames) -> Advice | None:
    count = evidence.prefill_memory_errors
    finding = f"memory ran out {count} times during prefill"
    return Advice(finding, f"lower {options.chunk} to 4096 or 2048", SGLANG) if count else None


def decode_memory(evidence: Evidence, options: OptionNames) -> Advice | None:
    count = evidence.decode_memory_errors
    finding = f"memory ran out {count} times during decoding"
    return Advice(finding, f"lower {options.running}", SGLANG) if count else None


def memory_fraction(evidence: Evidence, options: OptionNames) -> Advice | None:
    """Memory errors want a smaller KV cache; unused memory allows a larger one."""
    errors = evidence.prefill_memory_errors + evidence.decode_memory_errors
    if errors:
        return Advice(
            f"memory ran out {errors} times", f"lower {options.memory}, which helps prefill and decoding", SGLANG
        )
    free = evidence.free_gpu_gb
    if free is None or free < _FREE_GPU_GB:
        return None
    return Advice(f"{free:g} GB of each GPU are free", f"raise {options.memory} until 5 to 8 GB are left", SGLANG)


def copies_before_ranks(evidence: Evidence, options: OptionNames) -> Advice | None:
    max_usage = max((sample.usage for sample in evidence.busy if sample.usage is not None), default=None)
    if evidence.ranks < 2 or max_usage is None or max_usage >= _ROOM:
        return None
    finding = f"the model is split over {evidence.ranks} GPUs, and its KV cache was {max_usage:.0%} full at most"
    return Advice(finding, f"split it over fewer and raise {options.replicas}: copies give more throughput", SGLANG)


def no_shared_prefixes(evidence: Evidence, options: OptionNames) -> Advice | None:
    hit = evidence.cache_hit
    if hit is None or hit >= _HIT or options.policy is None or not any(sample.in_engine for sample in evidence.busy):
        return None
    finding = f"{hit:.1%} of the prompt tokens were in the prefix cache, and requests waited"
    return Advice(finding, f"set {options.policy} to fcfs: without shared prefixes it schedules at less cost", SGLANG)


RULES: Sequence[Rule] = (
    no_load,
    empty_queue,
    long_queue,
    unused_cache,
    full_workers,
    retractions,
    prefill_memory,
    decode_memory,
    memory_fraction,
    copies_before_ranks,
    no_shared_prefixes,
)


def _share(samples: Sequence[LoadSample], holds: Callable[[LoadSample], bool]) -> float:
    return sum(map(holds, samples)) / len(samples) if samples else 0.0


def _usage(sample: LoadSample) -> float:
    """Return how full the KV cache was; full if unknown, so that nothing follows from it."""
    return 1.0 if sample.usage is None else sample.usage
