"""Makes a rolling batch engine of a loaded model: decides the size of its KV cache and of its prompt chunks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import torch

from handlers.chats.model import ModelChats
from handlers.checkpoints.rotary import steady_length
from handlers.checkpoints.transformers_loading import eos_token_ids, sampling_defaults
from handlers.ranks.communicator import Communicator
from handlers.rolling_batch.attention.decode_passes import CudaCapture
from handlers.rolling_batch.attention.kv_cache import bytes_per_token
from handlers.rolling_batch.attention.probe import UnsupportedAttentionError
from handlers.rolling_batch.engine import RollingBatchEngine
from handlers.rolling_batch.options import RollingBatchOptions
from handlers.rolling_batch.prompts import PromptEncoder
from handlers.rolling_batch.runner.device_memory import (
    StepSize,
    enough_for_steps,
    kv_tokens,
    records_graphs,
    refuse_more_than_free,
    step_size,
)
from handlers.rolling_batch.runner.load_check import LoadCheck
from handlers.rolling_batch.runner.model_runner import ModelRunner
from handlers.rolling_batch.schedule.scheduler import Scheduler, SchedulerLimits, Sequence, StepPlan
from handlers.rolling_batch.speculation.draft_model import DraftModel, StepCosts
from handlers.rolling_batch.speculation.drafting import Speculation
from handlers.rolling_batch.speculation.step_times import LearntStepTimes
from lmi_server.contract.errors import (
    LmiServerError,
    ModelLoadError,
    ModelMemoryError,
    RollingBatchError,
    describe,
    first_line,
    is_device_failure,
    is_out_of_memory,
)
from lmi_server.contract.generation import SamplingParameters
from lmi_server.machine import model_imports
from lmi_server.machine.environment import own_rank

_log = logging.getLogger(__name__)

_GIB = 2**30
_MIN_SLOT = 16  # tokens
_MEASURED_ROWS, _MEASUREMENTS = 8, 6
# Slots in addition to those of running sequences: they keep finished sequences whose prefix others may reuse. On the
# CPU a slot takes memory only for the tokens in it.
_FURTHER_SLOTS = {"cpu": 64}


@dataclass(frozen=True)
class LoadedEngine:
    """An engine that is ready to step, its prompt encoder, and what was decided at load."""

    engine: RollingBatchEngine
    prompts: PromptEncoder
    max_model_len: int
    kv_tokens: int
    details: dict[str, Any] = field(default_factory=dict)
    chats: ModelChats | None = None  # None: the answers of chats are plain text, and requests with tools are refused
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # of OpenAI requests, by the model's files

    def stats(self) -> Mapping[str, float]:
        """Return the engine's gauges and counters."""
        stats = self.engine.stats
        return {
            "running_requests": stats.running,
            "waiting_requests": stats.waiting,
            "kv_cache_used_tokens": stats.used_tokens,
            "kv_cache_usage": stats.used_tokens / self.kv_tokens,
            "engine_steps_total": stats.steps,
            "generated_tokens_total": stats.generated_tokens,
            "computed_prompt_tokens_total": stats.prompt_tokens,
            "cached_prompt_tokens_total": stats.cached_prompt_tokens,
            "retracted_requests_total": stats.retracted_requests,
            "drafted_tokens_total": stats.drafted_tokens,
            "accepted_draft_tokens_total": stats.accepted_tokens,
            "kv_cache_kept_tokens": stats.kept_tokens,
            "new_token_ratio": stats.new_token_ratio,
            "gen_throughput": stats.throughput if stats.running else 0.0,
            "step_seconds": stats.step_seconds,
        }


@dataclass(frozen=True)
class LoadedModel:
    """A model for the rolling batch, or this rank's part of a model that is split over `communicator`.

    `max_len` counts tokens of prompt and output together, `weights` the bytes on each device of this rank. `check` has
    the logits of the model before any module was replaced; if it is None, those of the model as it is are taken.
    `is_local`: no parameter is a DTensor, so that modules can be fused. `details` are for the log and `explain`.
    `draft` is the smaller model that drafts tokens, if there is one.
    """

    model: Any
    tokenizer: Any
    max_len: int
    weights: Mapping[torch.device, int]
    communicator: Communicator | None = None
    check: LoadCheck | None = None
    is_local: bool = True
    details: Mapping[str, Any] = field(default_factory=dict)
    draft: LoadedModel | None = None

    def runner(self) -> ModelRunner:
        """Return the runner of the model's steps. Raises UnsupportedAttentionError."""
        return ModelRunner(self.model, self.max_len, self.communicator, self.check, self.is_local)


def load_engine(load: Callable[[], LoadedModel], options: RollingBatchOptions) -> LoadedEngine:
    """Load a model with `load`, and make its engine and KV cache.

    Raises ModelLoadError, naming the remedy, if the rolling batch cannot serve the model.
    """
    began = time.perf_counter()
    loaded = load()
    model, tokenizer = loaded.model, loaded.tokenizer
    with _refusals(model):
        runner = loaded.runner()
        step = step_size(runner, loaded.max_len, options)
        limits, max_len = _limits(runner, loaded, options, step)
        _refuse_unsteady_rope(model.config, max_len)
        _refuse_chunked_attention(model.config, max_len)
        with enough_for_steps(runner, limits.kv_tokens, step):
            runner.prepare(limits.slots, max_len, limits.max_running * (1 + _drafted(options)))
        decoding = _speed_up_decoding(runner, limits.max_running, options)
        drafting = _drafting_runner(loaded, limits.max_running)
    threads = torch.get_num_threads()
    if runner.use_helpers() and drafting is not None:
        drafting.use_helpers()
    engine = RollingBatchEngine(runner, Scheduler(limits), tokenizer, eos_token_ids(model, tokenizer), max_len)
    prompts, chats = PromptEncoder(tokenizer), ModelChats(tokenizer, options)
    with enough_for_steps(runner, limits.kv_tokens, step):
        warm_up(engine, prompts, 4 if runner.device.type == "cpu" else min(step.idle_chunk, max_len - 2))
    drafts = _speculate(engine, runner, drafting, options)
    details = {
        "model": type(model).__name__,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "device": str(runner.device),
        "ranks": own_rank().size,
        "threads": threads,
        "max_model_len": max_len,
        "max_running_requests": limits.max_running,
        "kv_cache_tokens": limits.kv_tokens,
        "kv_cache_gib": round(limits.kv_tokens * runner.cache.bytes_per_token / _GIB, 3),
        "chunked_prefill_size": limits.chunk_size,
        "schedule_policy": limits.policy,
        **loaded.details,
        **chats.details,
        "fused_modules": runner.fused,
        **decoding,
        **drafts,
        "load_seconds": round(time.perf_counter() - began, 1),
    }
    return LoadedEngine(engine, prompts, max_len, limits.kv_tokens, details, chats, sampling_defaults(model))


def _speed_up_decoding(runner: ModelRunner, rows: int, options: RollingBatchOptions) -> dict[str, Any]:
    """Do what the options ask for, compilation first: graphs then record the compiled code. Return what was done."""
    done: dict[str, Any] = {}
    if options.enable_torch_compile:
        done["compiled"] = runner.compile(rows)
    if records_graphs(runner, options):
        done["cuda_graphs"] = runner.capture(rows, CudaCapture)
    return done


@contextmanager
def _refusals(model: Any, refusal: type[ModelLoadError] = RollingBatchError) -> Iterator[None]:
    """Turn what a model under the rolling batch raises into a `refusal` that names the other ways to serve it."""
    try:
        yield
    except LmiServerError:
        raise
    except Exception as error:  # the border to the code of any model: it may need what the rolling batch leaves out
        if is_out_of_memory(error):
            raise
        if is_device_failure(error):
            raise ModelLoadError(
                f"the GPU failed while {type(model).__name__} was loaded: {first_line(error)}; nvidia-smi and the"
                " kernel's log (dmesg, NVRM: Xid) say more"
            ) from error
        reason = str(error) if isinstance(error, UnsupportedAttentionError) else f"its code raised {describe(error)}"
        raise refusal(
            f"{type(model).__name__} cannot run under the rolling batch: {reason}; other ways to serve it are"
            " option.rolling_batch=disable, for static batches, and option.rolling_batch=vllm"
        ) from error


def follow(loaded: LoadedModel) -> None:
    """Run a rank other than 0: compute the passes that rank 0 sends with this rank's part of the model, until Stop."""
    runner = loaded.runner()
    model_imports.loaded()
    runner.follow()


def set_kernel_threads() -> None:
    """Let torch and numba use the same number of threads.

    Both use libgomp, which keeps one team of threads for them, and grows or shrinks it if two operations want different
    numbers. numba sets the number to all cores when it starts its threads, here at the latest, so torch's is set again
    after that.
    """
    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    torch.set_num_threads(threads)


def _refuse_unsteady_rope(config: Any, max_len: int) -> None:
    """Refuse rotary embeddings that change with the longest position of a pass.

    With them the output of a request would depend on the other requests in the batch. Raises UnsupportedAttentionError
    naming the length up to which they are constant.
    """
    steady = steady_length(config.get_text_config().to_dict())
    if steady is not None and max_len > steady:
        raise UnsupportedAttentionError(
            f"its rotary embeddings change with the length; set option.max_model_len={steady}"
        )


def _refuse_chunked_attention(config: Any, max_len: int) -> None:
    """Refuse contexts longer than the chunks within which layers attend (Llama 4).

    The kernels know windows, which move with each token, but no chunks. Raises UnsupportedAttentionError.
    """
    text_config = config.get_text_config()
    if "chunked_attention" not in (getattr(text_config, "layer_types", None) or ()):
        return
    chunk = int(text_config.attention_chunk_size)
    if max_len > chunk:
        raise UnsupportedAttentionError(
            f"its layers attend in chunks of {chunk} tokens; set option.max_model_len={chunk}"
        )


def _limits(
    runner: ModelRunner, loaded: LoadedModel, options: RollingBatchOptions, step: StepSize
) -> tuple[SchedulerLimits, int]:
    per_token = bytes_per_token(runner.layers, runner.dtype)
    running = min(options.max_running_requests or options.max_rolling_batch_size, options.max_rolling_batch_size)
    slots = running + _FURTHER_SLOTS.get(runner.device.type, 0)
    max_len = loaded.max_len
    tokens = min(slots * max_len, kv_tokens(runner, loaded.weights, options, step))
    refuse_more_than_free(runner, tokens, options)
    if tokens < 16:
        raise ModelMemoryError(
            f"no memory for a KV cache: there is room for {max(tokens, 0)} tokens of {per_token} bytes each;"
            " raise option.kv_cache_memory_gb, or free memory"
        )
    if runner.device.type != "cpu":  # slots are allocated in full there, all of one length
        max_len = _slot_length(max_len, tokens, slots, options)
    all_at_once = options.chunked_prefill_size == -1 and runner.device.type == "cpu"
    chunk, idle_chunk = (tokens, tokens) if all_at_once else (step.chunk, step.idle_chunk)
    limits = SchedulerLimits(
        running, tokens, chunk, idle_chunk, slots, options.schedule_policy, options.schedule_conservativeness
    )
    return limits, min(max_len, tokens)


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
    _log.warning(
        "%s: prompts and outputs of more than %d tokens in all are refused; lower option.max_rolling_batch_size for"
        " longer ones",
        reason, length,
    )  # fmt: skip
    return length


class _AnyToken:
    """A grammar that allows every token: it runs the kernels that other grammars need."""

    is_stale = False
    is_complete = False

    def __init__(self, vocabulary: int) -> None:
        self.mask = np.full((vocabulary + 31) // 32, 2**32 - 1, np.uint32)

    def fill(self) -> None:
        return

    def accept(self, token: int) -> None:
        return


def _drafted(options: RollingBatchOptions) -> int:
    """Return how many tokens a step drafts at most for one sequence."""
    return 0 if options.speculative_draft_model is None else options.speculative_length


def _drafting_runner(loaded: LoadedModel, slots: int) -> ModelRunner | None:
    """Return the runner of the draft model, if there is one."""
    if loaded.draft is None:
        return None
    with _refusals(loaded.draft.model, ModelLoadError):
        drafting = loaded.draft.runner()
        drafting.prepare(slots, loaded.draft.max_len)
    return drafting


def _speculate(
    engine: RollingBatchEngine, runner: ModelRunner, drafting: ModelRunner | None, options: RollingBatchOptions
) -> dict[str, Any]:
    """Let the engine draft tokens as the options say. Return what was decided."""
    if options.speculative_draft_model is None:
        return {}
    seconds, share = step_seconds(runner)
    if drafting is None:
        engine.speculate(Speculation(options.speculative_length, LearntStepTimes(share)), _clock(runner))
        return {"row_share": round(share, 3)}
    draft_seconds, draft_share = step_seconds(drafting)
    costs = StepCosts(share, draft_seconds / seconds, draft_share * draft_seconds / seconds)
    engine.speculate(DraftModel(drafting, options.speculative_length, runner.vocabulary, costs))
    return {
        "draft_model": options.speculative_draft_model,
        "row_share": round(costs.row, 3),
        "draft_share": round(costs.draft, 3),
    }


def step_seconds(runner: ModelRunner) -> tuple[float, float]:
    """Measure a decoding step with one row in seconds, and how much longer each further row takes, as a share."""
    sequence = Sequence(0, [0, 0], 1, _MEASURED_ROWS + 1, slot=0, computed=1)

    clock = _clock(runner)

    def seconds(drafted: int) -> float:
        plan = StepPlan([sequence], [], drafts={sequence: [0] * drafted} if drafted else {})
        began = clock()
        runner.run(plan, set()).logits[0, 0].item()  # waits for the device
        return clock() - began

    one, several = (min(seconds(drafted) for _ in range(_MEASUREMENTS)) for drafted in (0, _MEASURED_ROWS))
    runner.cache.trim(0, 0)
    return one, max((several - one) / _MEASURED_ROWS / one, 0.0)


def _clock(runner: ModelRunner) -> Callable[[], float]:
    """Return what times steps: on the CPU it counts the processor time of this thread, which computes a part of each.

    So the turns of other programs do not count, as in `kernel_choice.thread_seconds`.
    """
    return time.thread_time if runner.device.type == "cpu" else time.perf_counter


def warm_up(engine: RollingBatchEngine, prompts: PromptEncoder, tokens: int = 4) -> None:
    """Run requests, so that kernels are compiled and buffers allocated before the model is ready.

    The prompt of the first has up to `tokens` tokens, more than four where a large step might lack memory. The others
    draw their token in the three ways that have kernels, and choose it by the mask of a grammar: the first request that
    needs a kernel must not hold up its batch while it is compiled.
    """
    prompt = (prompts.tokenize("a b c") or [0])[:4]
    long = (prompt * tokens)[: max(tokens, len(prompt))]
    parameters = SamplingParameters(max_new_tokens=2, ignore_eos=True, logprobs=0)
    engine.add("warm-up", long, parameters, "", 0, lambda output: None)
    for more in ({}, {"repetition_penalty": 1.5}, {"top_k": 2}):
        drawn = SamplingParameters(max_new_tokens=1, ignore_eos=True, do_sample=True, **more)
        engine.add(f"warm-up, drawn, {more}", prompt[:1], drawn, "", 0, lambda output: None)
    for biases in ({}, {0: 0.0}):
        masked = SamplingParameters(max_new_tokens=1, logit_bias=biases)
        anything = _AnyToken(engine.vocabulary)
        engine.add(f"warm-up, masked, {biases}", prompt[:1], masked, "", 0, lambda output: None, grammar=anything)
    while engine.has_work:
        engine.step()
    engine.reset_stats()
