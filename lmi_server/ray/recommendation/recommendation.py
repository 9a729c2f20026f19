"""Recommends workers and batch sizes for a model on a kind of accelerator, from its size and the memory.

docs/ray-model-files.md has the rule. It asks the estimate that `lmi-server explain` shows
(`configuration.checks.memory_estimate`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lmi_server.configuration.checks.memory_estimate import Estimate, estimate, gib, inner_size
from lmi_server.configuration.engine import describe_engine
from lmi_server.configuration.handlers import HANDLERS, load_options_type
from lmi_server.configuration.model_directory.checkpoint import read_config
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.machine.device_tools import Gpu
from lmi_server.machine.inventory import Machine
from lmi_server.ray.deployments.deployment import ONGOING_SHARE
from lmi_server.ray.recommendation.accelerators import (
    ACCELERATORS,
    FAMILIES,
    FURTHER_FAMILIES,
    RayAccelerator,
    accelerator_of,
)

Goal = Literal["latency", "throughput"]
UTILIZATION = 0.9
"""vLLM's gpu_memory_utilization: the share of memory for weights, activations and KV cache."""
ACTIVATIONS = 2**30
"""Bytes of a device that activations and CUDA graphs take of that."""
CONTEXT = 8192
"""Default limit of prompt and output tokens together; a model may have a lower one."""
DEGREES = (1, 2, 4, 8)
_TOKENS_OF_A_REQUEST = 2048  # that a running request holds on average; fewer if the context is shorter
_EFFICIENCY = 0.5  # share of the peak that prefill reaches
_STEP_S: Mapping[Goal, float] = {"latency": 0.1, "throughput": 0.4}
_STEP_READS_S = 0.025  # for latency, a decode step reads weights and KV cache in this time, or in twice that of weights
_MAX_SEQS: Mapping[Goal, int] = {"latency": 128, "throughput": 512}
_MIN_SEQS = 4
_MIN_BATCHED_TOKENS, _MAX_BATCHED_TOKENS = 512, 16384
_NOT_IN_HALF = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""The values of model_type for which vLLM refuses float16, because they are not stable in it."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model by its config.json; `location` is its directory, or its Hugging Face id if it is not here."""

    id: str
    location: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Settings of one replica. `target_ongoing_requests` is what autoscaling aims at."""

    workers: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    target_ongoing_requests: int
    memory: Estimate

    def properties(self, model: ModelShape, accelerator: RayAccelerator) -> str:
        """Return a serving.properties for the model, which ends with a line end."""
        values = {
            "model_id": model.location,
            "rolling_batch": "vllm",
            "dtype": "fp16" if accelerator.dtype == "half" else "auto",
            "tensor_parallel_degree": self.workers,
            "max_model_len": self.max_model_len,
            "max_rolling_batch_size": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "gpu_memory_utilization": UTILIZATION,
        }
        lines = [
            f"# {self.workers} x {accelerator.name}: {gib(self.memory.weights_bytes)} of weights on each device,"
            f" and room for {self.memory.kv_tokens_that_fit} tokens of KV cache",
            "engine=Python",
            *(f"option.{name}={value}" for name, value in values.items()),
        ]
        return "".join(f"{line}\n" for line in lines)


def find_model(name: str) -> ModelShape:
    """Return the model of a directory with a config.json, or of the name or Hugging Face id of a known family.

    Raises ConfigurationError if it is neither.
    """
    directory = Path(name).absolute()
    config = read_config(str(directory))
    if config:
        return ModelShape(str(directory), str(directory), config)
    families = {**FAMILIES, **FURTHER_FAMILIES}
    for family, (model_id, shape) in families.items():
        if name in (family, model_id):
            return ModelShape(model_id, model_id, shape)
    known = ", ".join(families)
    raise ConfigurationError(f'MODEL = "{name}" is not allowed; allowed: a directory with a config.json, or {known}')


def find_accelerator(name: str) -> RayAccelerator:
    """Return the accelerator with a name, in any case. Raises ConfigurationError if the name is unknown."""
    found = next((accelerator for key, accelerator in ACCELERATORS.items() if key.lower() == name.lower()), None)
    if found is None:
        raise ConfigurationError(f'--accelerator = "{name}" is not allowed; allowed: {", ".join(ACCELERATORS)}')
    return found


def own_accelerator(products: Sequence[str]) -> RayAccelerator:
    """Return the accelerator of a machine with these GPUs. Raises ConfigurationError if it is not known."""
    found = accelerator_of(products[0]) if products else None
    if found is None:
        here = f"{excerpt(products[0])}, for which there are no figures" if products else "no GPU that nvidia-smi shows"
        raise ConfigurationError(f"this machine has {here}; name one with --accelerator: {', '.join(ACCELERATORS)}")
    return found


def recommend(
    model: ModelShape,
    accelerator: RayAccelerator,
    goal: Goal,
    context: int = CONTEXT,
    max_devices: int = DEGREES[-1],
    spread: bool = True,
) -> Recommendation:
    """Return the recommendation for `goal`, on at most `max_devices` devices.

    A replica takes the fewest devices on which the model fits; for latency, with `spread`, twice as many if its heads
    can be divided among them, because each then reads half of the weights per token. Raises ConfigurationError if the
    model fits on none.
    """
    if _is_unstable(model, accelerator):
        raise ConfigurationError(
            f"{model.id} is not stable in float16, and {accelerator.name} has no bfloat16; name another accelerator"
        )
    memory = memory_on(model, accelerator, 1, context)
    if memory.weights_bytes is None or not memory.kv_bytes_per_token:
        raise ConfigurationError(
            f"{model.id}: the size of the model is not known; its config.json must have num_hidden_layers, hidden_size,"
            " num_attention_heads and vocab_size, and a quantised checkpoint must be there with its weights"
        )
    degrees = [degree for degree in DEGREES if degree <= max_devices]
    fitting = [found for degree in degrees if (found := for_degree(model, accelerator, degree, goal, context))]
    if not fitting:
        devices = f"{degrees[-1]} x {accelerator.name} with {accelerator.memory_gib:g} GiB"
        raise ConfigurationError(
            f"{model.id} does not fit on {devices}; name another accelerator, or a quantised checkpoint"
        )
    return fitting[1] if spread and goal == "latency" and len(fitting) > 1 else fitting[0]


def for_degree(
    model: ModelShape, accelerator: RayAccelerator, degree: int, goal: Goal, context: int = CONTEXT
) -> Recommendation | None:
    """Return the recommendation for `degree` devices.

    None if the model does not fit, cannot be divided so, or does not run in the accelerator's 16 bits.
    """
    if _is_unstable(model, accelerator):
        return None
    text = model.config.get("text_config") or model.config
    length = min(context, int(text.get("max_position_embeddings") or text.get("n_positions") or context))
    memory = memory_on(model, accelerator, degree, length)
    if (
        not _is_divisible(text, degree)
        or memory.weights_bytes is None
        or not memory.kv_bytes_per_token
        or memory.parameters is None
    ):
        return None
    tokens = memory.kv_tokens_that_fit or 0
    per_request = min(length, _TOKENS_OF_A_REQUEST)
    seqs = min(tokens // per_request, _MAX_SEQS[goal])
    if goal == "latency":
        alone_s = memory.weights_bytes / accelerator.bandwidth  # a step with one request reads little but weights
        kv_bytes = (max(_STEP_READS_S, 2 * alone_s) - alone_s) * accelerator.bandwidth
        seqs = min(seqs, max(_MIN_SEQS, int(kv_bytes) // (memory.kv_bytes_per_token * per_request)))
    if tokens < length or seqs < _MIN_SEQS:
        return None
    seqs = _power_of_two(seqs)
    flops = accelerator.flops * _EFFICIENCY * degree
    batched = _power_of_two(int(_STEP_S[goal] * flops / (2 * _active_parameters(text, memory.parameters))))
    return Recommendation(
        workers=degree,
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(_MIN_BATCHED_TOKENS, seqs, min(_MAX_BATCHED_TOKENS, batched)),
        target_ongoing_requests=max(1, round(seqs * ONGOING_SHARE)),
        memory=memory,
    )


def memory_on(model: ModelShape, accelerator: RayAccelerator, degree: int, context: int, seqs: int = 1024) -> Estimate:
    """Return the estimate for `degree` devices. Free is what vLLM may use, less the activations."""
    spec = HANDLERS.by_rolling_batch("vllm")
    assert spec is not None, "the table of handlers has vLLM"
    # vLLM takes a checkpoint in 32 bits in 16.
    dtype = "fp16" if accelerator.dtype == "half" else "bf16"
    values = {"dtype": dtype, "max_model_len": context, "max_rolling_batch_size": seqs}
    engine = describe_engine(spec, load_options_type(spec).model_validate(values))
    total = int(accelerator.memory_gib * 2**30)
    device = Gpu("0", total, max(0, int(total * UTILIZATION) - ACTIVATIONS))
    machine = Machine(total_bytes=total, available_bytes=total, gpus=(device,) * degree)
    return estimate(engine.memory, model.location, model.config, degree, machine)


def _is_unstable(model: ModelShape, accelerator: RayAccelerator) -> bool:
    return accelerator.dtype == "half" and model.config.get("model_type") in _NOT_IN_HALF


def _is_divisible(text: Mapping[str, Any], degree: int) -> bool:
    """Return whether heads can be divided: fewer heads of keys and values than devices are copied, evenly."""
    heads = int(text.get("num_attention_heads") or text.get("n_head") or 1)
    kv_heads = int(text.get("num_key_value_heads") or text.get("num_kv_heads") or heads)
    return heads % degree == 0 and max(kv_heads, degree) % min(kv_heads, degree) == 0


def _active_parameters(text: Mapping[str, Any], parameters: int) -> int:
    """Return the parameters that compute one token: of a mixture of experts, only some."""
    experts = text.get("num_local_experts") or text.get("num_experts") or 1
    used = text.get("num_experts_per_tok") or experts
    inner, layers = inner_size(text, experts) or 0, int(text.get("num_hidden_layers") or 0)
    return parameters - (experts - used) * layers * 3 * int(text.get("hidden_size") or 0) * inner


def _power_of_two(number: int) -> int:
    """Return the greatest power of two that is not above `number`, at least 1."""
    return 1 << max(0, number.bit_length() - 1)
