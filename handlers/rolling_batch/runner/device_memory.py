"""How the memory of a worker's devices is shared out: weights, a step's activations, and the KV cache.

On the CPU a slot takes memory as it is used, and activations are small beside what is left free. A GPU has neither: its
KV cache is allocated in full, and a step that needs more than is free fails. So the largest step is measured there
before the KV cache gets the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from handlers.rolling_batch.attention.kv_cache import bytes_per_token, fitting_tokens
from handlers.rolling_batch.attention.torch_attention import MAX_SCORES
from handlers.rolling_batch.options import RollingBatchOptions
from handlers.rolling_batch.runner.model_runner import ModelRunner
from lmi_server.contract.errors import ModelMemoryError, first_line, is_out_of_memory
from lmi_server.machine.environment import own_rank
from lmi_server.machine.memory import free_and_total

logger = logging.getLogger(__name__)

_GIB = 2**30
# Prompt tokens per step (while others decode, while none does). In processor time of one core, a step of a model with
# 135 million parameters takes 62 ms to decode 31 sequences, 235 ms with 128 prompt tokens beside them, and 723 ms with
# 512: 1.27 ms for each prompt token, and 10 ms for having any. 8 of these 10 are Python between the calls of a layer:
# only passes without chunks do without it, and further cores do not shorten it. So chunks of 512 give 5 % more tokens
# per second on two cores, with prompts and outputs of 128 tokens. But the streams of others then stop for twelve times
# as long as from token to token; with 128 it is four times.
_CPU_CHUNKS = (128, 512)
_GPU_CHUNKS = (2048, 8192)
_MIN_CHUNK = 256
_LARGEST_STEP = 0.25  # of the free memory, for a chunk whose size no option gives
_CPU_SHARE, _GPU_SHARE = 0.5, 0.9  # of the free memory
# Scores, their soft cap, and their weights in float32 and in the model's type. torch's fused kernels take less.
_BYTES_PER_SCORE = 12


@dataclass(frozen=True)
class StepSize:
    """Prompt tokens of a step, while others decode and while none does, and the bytes that it takes of each GPU."""

    chunk: int
    idle_chunk: int
    activations: Mapping[torch.device, int] = field(default_factory=dict)


def step_size(runner: ModelRunner, max_len: int, options: RollingBatchOptions) -> StepSize:
    """Return the size of a step: the value of option.chunked_prefill_size, or else as many as memory allows.

    Raises ModelMemoryError if a GPU has no memory for it.
    """
    asked = max_len if options.chunked_prefill_size == -1 else options.chunked_prefill_size
    if runner.device.type == "cpu":
        return StepSize(*(_CPU_CHUNKS if asked is None else (asked, asked)))
    rows = min(asked or _GPU_CHUNKS[1], max_len)
    activations = _activations(runner, rows)
    while asked is None and rows > _MIN_CHUNK and not _leaves_room(activations):
        rows //= 2
        activations = _activations(runner, rows)
        logger.warning("a step computes at most %d prompt tokens: the GPU has no memory for more", rows)
    if activations is None:
        raise ModelMemoryError(
            f"option.chunked_prefill_size={rows}: a GPU has no memory for a step of so many prompt tokens beside the"
            " weights; lower it, set option.quantize=bitsandbytes4, or raise option.tensor_parallel_degree"
        )
    return StepSize(min(rows, asked or _GPU_CHUNKS[0]), rows, activations)


def _leaves_room(activations: Mapping[torch.device, int] | None) -> bool:
    if activations is None:
        return False
    return all(size <= _LARGEST_STEP * memory_of(device)[0] for device, size in activations.items())


def _activations(runner: ModelRunner, rows: int) -> Mapping[torch.device, int] | None:
    """Compute `rows` rows, and return how many bytes each GPU took for that at most; None if one had too few."""
    devices = {layer.device for layer in runner.layers}
    torch.cuda.empty_cache()
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    before = {device: torch.cuda.memory_allocated(device) for device in devices}
    try:
        runner.measure(rows)
    except RuntimeError as error:
        if not is_out_of_memory(error) or own_rank().size > 1:  # the other ranks of a group have failed as well
            raise
        return None
    return {device: torch.cuda.max_memory_allocated(device) - before[device] for device in devices}


def kv_tokens(
    runner: ModelRunner, weights: Mapping[torch.device, int], options: RollingBatchOptions, step: StepSize
) -> int:
    """Return how many tokens of the KV cache there is memory for, on every device that has layers."""
    if options.kv_cache_memory_gb is not None:
        size = options.kv_cache_memory_gb * _GIB / own_rank().size
        return int(size // bytes_per_token(runner.layers, runner.kept_dtype))
    layers = {
        layer.device: [other for other in runner.layers if other.device == layer.device] for layer in runner.layers
    }
    # Attention over slots gathers the keys and values of one layer at a time, and CUDA graphs do so in memory of their
    # own. Over pages it reads them in place.
    gathered = 0 if runner.page else 2 if records_graphs(runner, options) else 1
    shares = {device: len(own) / (len(own) + gathered) for device, own in layers.items()}
    room = {device: _room(device, share, weights.get(device, 0), options, step) for device, share in shares.items()}
    return fitting_tokens(runner.layers, runner.kept_dtype, room)


def cache_room(
    runner: ModelRunner, weights: Mapping[torch.device, int], options: RollingBatchOptions, step: StepSize
) -> float:
    """Return the bytes for keys, values and states of a model on one device."""
    if options.kv_cache_memory_gb is not None:
        return options.kv_cache_memory_gb * _GIB
    layers = max(len(runner.layers), 1)
    gathered = 0 if runner.page else 1
    return _room(runner.device, layers / (layers + gathered), weights.get(runner.device, 0), options, step)


def records_graphs(runner: ModelRunner, options: RollingBatchOptions) -> bool:
    """Return whether decoding is to be recorded as CUDA graphs: where they are known to work, if no key says it."""
    if options.enable_cuda_graph is not None:
        return options.enable_cuda_graph
    return runner.device.type == "cuda" and torch.version.hip is None and runner.uncapturable() is None


def _room(device: torch.device, share: float, weights: int, options: RollingBatchOptions, step: StepSize) -> float:
    """Return the bytes for the KV cache; it gets `share` of what is left where no key says how much it may take."""
    free, total = memory_of(device)
    if options.mem_fraction_static is not None:
        return total * options.mem_fraction_static - weights
    if device.type == "cpu":
        return free * _CPU_SHARE
    left = free - step.activations.get(device, 0) - MAX_SCORES * _BYTES_PER_SCORE
    return min(free * _GPU_SHARE, left) * share


def refuse_more_than_free(runner: ModelRunner, tokens: int, options: RollingBatchOptions) -> None:
    """Raise ModelMemoryError, naming the key, if a KV cache of `tokens` tokens takes more than a GPU has free."""
    for device in {layer.device for layer in runner.layers if layer.device.type != "cpu"}:
        layers = [layer for layer in runner.layers if layer.device == device]
        needed, free = tokens * bytes_per_token(layers, runner.kept_dtype), memory_of(device)[0]
        if needed > free:
            key = "mem_fraction_static" if options.kv_cache_memory_gb is None else "kv_cache_memory_gb"
            raise ModelMemoryError(
                f"option.{key}={getattr(options, key)}: the KV cache takes {needed / _GIB:.1f} GiB on {device}, where"
                f" {free / _GIB:.1f} GiB are free beside the weights; lower it"
            )


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return free and total bytes of the device, which the ranks of a group share if it is main memory."""
    if device.type != "cpu":
        torch.cuda.empty_cache()  # torch's memory of tensors that are gone counts as free
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    free, total = free_and_total()
    return free // own_rank().size, total // own_rank().size


@contextmanager
def enough_for_steps(runner: ModelRunner, tokens: int, step: StepSize) -> Iterator[None]:
    """Raise ModelMemoryError with the remedy if the KV cache of `tokens` tokens leaves no memory for a step."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        size = tokens * bytes_per_token(runner.layers, runner.kept_dtype) / _GIB
        raise ModelMemoryError(
            f"a KV cache of {size:.1f} GiB leaves too little memory for a step of {step.idle_chunk} prompt tokens"
            f" ({first_line(error)}); lower option.kv_cache_memory_gb, option.mem_fraction_static or"
            " option.chunked_prefill_size"
        ) from error
