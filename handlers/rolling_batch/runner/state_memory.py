"""How the memory of the KV cache is shared with the states of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from handlers.rolling_batch.attention.kv_cache import bytes_per_token
from handlers.rolling_batch.options import RollingBatchOptions
from handlers.rolling_batch.runner.device_memory import StepSize, cache_room, kv_tokens
from handlers.rolling_batch.runner.model_runner import ModelRunner
from lmi_server.contract.errors import ModelMemoryError

_GIB = 2**30
# Snapshots for each running sequence: what it leaves behind when it ends, and one where its prompt parted from others.
_SNAPSHOTS = 2
_SNAPSHOT_SHARE = 0.25  # of what the states of running sequences leave of the memory, at most


def tokens_and_states(
    runner: ModelRunner,
    weights: Mapping[torch.device, int],
    options: RollingBatchOptions,
    step: StepSize,
    running: int,
    max_tokens: int,
) -> tuple[int, int]:
    """Return how many tokens of the KV cache and how many states there is memory for; no states if no layer has any.

    Running sequences come first, then snapshots, then tokens. Raises ModelMemoryError if those leave no room.
    """
    if runner.states is None:
        return min(max_tokens, kv_tokens(runner, weights, options, step)), 0
    size, per_token = runner.states.bytes_per_sequence, bytes_per_token(runner.layers, runner.kept_dtype)
    room = cache_room(runner, weights, options, step)
    least = max(running, 2)
    left = room - (least + bool(runner.page)) * size  # with pages one row more fills up recorded passes
    if left < 0:
        raise ModelMemoryError(
            f"no memory for the states of recurrent layers: {running} requests at a time take"
            f" {least * size / _GIB:.2f} GiB, {room / _GIB:.2f} GiB are there; lower option.max_rolling_batch_size,"
            " raise option.kv_cache_memory_gb, or free memory"
        )
    snapshots = min(_SNAPSHOTS * running, int(left * _SNAPSHOT_SHARE // size))
    left -= snapshots * size
    tokens = max_tokens if not per_token else min(max_tokens, int(left // per_token))
    return tokens, least + snapshots
