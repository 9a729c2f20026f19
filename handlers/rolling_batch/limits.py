"""What an engine may have at a time: requests, tokens of the KV cache, and tokens of one request."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from handlers.rolling_batch.attention.kv_cache import bytes_per_token
from handlers.rolling_batch.options import RollingBatchOptions
from handlers.rolling_batch.runner.device_memory import StepSize, refuse_more_than_free
from handlers.rolling_batch.runner.model_runner import ModelRunner
from handlers.rolling_batch.runner.state_memory import tokens_and_states
from handlers.rolling_batch.schedule.scheduler import SchedulerLimits
from lmi_server.contract.errors import ModelMemoryError

logger = logging.getLogger(__name__)

_MIN_SLOT = 16  # tokens
# Sequences in addition to running ones: finished ones, whose prefix others may reuse. On the CPU a slot takes memory
# only for the tokens in it, and pages need no slot when their sequence has finished.
_KEPT = 64


def scheduler_limits(
    runner: ModelRunner, max_len: int, weights: Mapping[torch.device, int], options: RollingBatchOptions, step: StepSize
) -> tuple[SchedulerLimits, int]:
    """Return what the scheduler may plan, and how many tokens a prompt and its output may have together.

    `weights` are the bytes of the model on each device. Raises ModelMemoryError.
    """
    per_token = bytes_per_token(runner.layers, runner.kept_dtype)
    running = min(options.max_running_requests or options.max_rolling_batch_size, options.max_rolling_batch_size)
    on_cpu, page = runner.device.type == "cpu", runner.page or 1
    kept = running + _KEPT if on_cpu or runner.page else running
    slots = running if runner.page else kept
    most = kept * -(-max_len // page) * page
    tokens, states = tokens_and_states(runner, weights, options, step, running, most)
    tokens -= tokens % page
    refuse_more_than_free(runner, tokens, options)
    if tokens < 16:
        raise ModelMemoryError(
            f"no memory for a KV cache: there is room for {max(tokens, 0)} tokens of {per_token} bytes each;"
            " raise option.kv_cache_memory_gb, or free memory"
        )
    if runner.page:
        max_len = _fitting_length(max_len, tokens, options)
    elif not on_cpu:  # slots are allocated in full there, all of one length
        max_len = _slot_length(max_len, tokens, slots, options)
    all_at_once = options.chunked_prefill_size == -1 and on_cpu
    chunk, idle_chunk = (tokens, tokens) if all_at_once else (step.chunk, step.idle_chunk)
    limits = SchedulerLimits(
        running, tokens, chunk, idle_chunk, slots, options.schedule_policy, options.schedule_conservativeness,
        state_rows=states, page=runner.page,
    )  # fmt: skip
    return limits, min(max_len, tokens)


def _fitting_length(max_len: int, tokens: int, options: RollingBatchOptions) -> int:
    """Return how many tokens a request has. Raises ModelMemoryError if the options ask for more than all pages hold."""
    if tokens >= max_len:
        return max_len
    reason = f"the KV cache has room for {tokens} tokens, and a request may have {max_len}"
    if options.context_length() is not None:
        raise ModelMemoryError(
            f"{reason}; lower option.max_model_len, set option.quantize=bitsandbytes4, or raise"
            " option.tensor_parallel_degree"
        )
    logger.warning("%s: longer prompts and outputs than fit are refused", reason)
    return tokens


def _slot_length(max_len: int, tokens: int, slots: int, options: RollingBatchOptions) -> int:
    """Return how many tokens each of `slots` slots has. Raises ModelMemoryError if the options ask for more."""
    length = tokens // slots
    if length >= max_len:
        return max_len
    reason = f"the memory of the GPU has room for {tokens} tokens, {length} for each of {slots} requests at a time"
    if length < _MIN_SLOT or options.context_length() is not None:
        raise ModelMemoryError(
            f"{reason}, and each may have {max_len}; lower option.max_rolling_batch_size or option.max_model_len, set"
            " option.quantize=bitsandbytes4, or raise option.tensor_parallel_degree"
        )
    logger.warning(
        "%s: prompts and outputs of more than %d tokens in all are refused; lower option.max_rolling_batch_size for"
        " longer ones",
        reason, length,
    )  # fmt: skip
    return length
