"""Makes a rolling batch engine of a loaded model: decides the size of its KV cache and of its prompt chunks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numba
import torch

from handlers.chats.model import ModelChats
from handlers.checkpoints.transformers_loading import eos_token_ids, forced_eos_token_ids, sampling_defaults
from handlers.generation.prompts import PromptEncoder
from handlers.ranks.communicator import Communicator
from handlers.rolling_batch.attention.decode_passes import CudaCapture
from handlers.rolling_batch.attention.frequencies import refuse_unsteady_rope
from handlers.rolling_batch.attention.kv_cache import KVCache
from handlers.rolling_batch.attention.probe import UnsupportedAttentionError
from handlers.rolling_batch.engine import RollingBatchEngine
from handlers.rolling_batch.images.check import ImageCheck
from handlers.rolling_batch.images.intake import ImageModel
from handlers.rolling_batch.images.loading import LoadedImages
from handlers.rolling_batch.limits import scheduler_limits
from handlers.rolling_batch.options import RollingBatchOptions
from handlers.rolling_batch.runner.device_memory import StepSize, enough_for_steps, records_graphs, step_size
from handlers.rolling_batch.runner.load_check import LoadCheck
from handlers.rolling_batch.runner.model_runner import ModelRunner
from handlers.rolling_batch.schedule.scheduler import Scheduler, SchedulerLimits
from handlers.rolling_batch.speculation.start import speculate
from handlers.rolling_batch.warm_up import warm_up
from lmi_server.contract.errors import (
    LmiServerError,
    ModelLoadError,
    RollingBatchError,
    describe,
    first_line,
    is_device_failure,
    is_out_of_memory,
)
from lmi_server.machine.environment import own_rank
from lmi_server.processes import load_progress, model_imports

logger = logging.getLogger(__name__)

_GIB = 2**30


@dataclass(frozen=True)
class LoadedEngine:
    """An engine ready to step, its prompt encoder, and the decisions at load."""

    engine: RollingBatchEngine
    prompts: PromptEncoder
    max_model_len: int
    kv_tokens: int
    details: dict[str, Any] = field(default_factory=dict)
    images: ImageModel | None = None  # None: the model reads text alone
    chats: ModelChats | None = None  # None: the answers of chats are plain text, and requests with tools are refused
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # of OpenAI requests, by the model's files
    free_cache: Callable[[], None] | None = None  # gives the memory of the KV cache back while no request runs

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
    `draft` is the smaller model that drafts tokens, if there is one. `images` encodes images, or says why it cannot;
    None if the model reads none. `page` and `kv_dtype` are as in ModelRunner.
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
    images: LoadedImages | str | None = None
    page: int | None = None
    kv_dtype: str | None = None

    def runner(self) -> ModelRunner:
        """Return the runner of the model's steps. Raises UnsupportedAttentionError."""
        return ModelRunner(
            self.model, self.max_len, self.communicator, self.check, self.is_local, self.page, self.kv_dtype
        )


def load_engine(load: Callable[[], LoadedModel], options: RollingBatchOptions) -> LoadedEngine:
    """Load a model with `load`, and make its engine and KV cache.

    Raises ModelLoadError, naming the remedy, if the rolling batch cannot serve the model.
    """
    began = time.perf_counter()
    loaded = load()
    model, tokenizer = loaded.model, loaded.tokenizer
    load_progress.report("preparing the KV cache")
    with _refusals(model):
        runner = loaded.runner()
        step = step_size(runner, loaded.max_len, options)
        runner.change_frequencies(loaded.max_len)
        limits, max_len = _prepare(runner, loaded, options, step)
        if limits.page != runner.page:  # the model has to be computed in another way, over slots
            limits, max_len = _prepare(runner, loaded, options, step)
        decoding = _speed_up_decoding(runner, limits.max_running, options)
        drafting = _drafting_runner(loaded, limits.max_running)
    threads = torch.get_num_threads()
    if runner.use_helpers() and drafting is not None:
        drafting.use_helpers()
    images = _checked_images(loaded, runner)
    scheduler = Scheduler(limits)
    scheduler.border = runner.border
    engine = RollingBatchEngine(runner, scheduler, tokenizer, eos_token_ids(model, tokenizer), max_len)
    engine.force_ends(forced_eos_token_ids(model))
    prompts = PromptEncoder(tokenizer, None if images is None else images.reader.placeholder)
    chats = ModelChats(tokenizer, options)
    load_progress.report("warming up")
    with enough_for_steps(runner, limits.kv_tokens, step):
        warm_up(engine, prompts, 4 if runner.device.type == "cpu" else min(step.idle_chunk, max_len - 2))
    drafts = speculate(engine, runner, drafting, options)
    if runner.may_run_ahead:
        engine.run_ahead()
    details = {
        "model": type(model).__name__,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "device": str(runner.device),
        "ranks": own_rank().size,
        "threads": threads,
        "max_model_len": max_len,
        "max_running_requests": limits.max_running,
        "kv_cache_tokens": limits.kv_tokens,
        **({} if loaded.kv_dtype is None else {"kv_cache_dtype": loaded.kv_dtype}),
        **({"kv_cache_page": runner.page} if runner.page else {}),
        "kv_cache_gib": round(limits.kv_tokens * runner.cache.bytes_per_token / _GIB, 3),
        **_states_in_memory(runner, limits.state_rows),
        "chunked_prefill_size": limits.chunk_size,
        "schedule_policy": limits.policy,
        **loaded.details,
        **({} if loaded.images is None else {"images": "text alone" if images is None else "read"}),
        **chats.details,
        "fused_modules": runner.fused,
        **decoding,
        **drafts,
        "load_seconds": round(time.perf_counter() - began, 1),
    }
    defaults = sampling_defaults(model)
    free = _freeing(runner)
    return LoadedEngine(engine, prompts, max_len, limits.kv_tokens, details, images, chats, defaults, free)


def _freeing(runner: ModelRunner) -> Callable[[], None] | None:
    """Return what gives the memory of the KV cache back to the system, None if only the end of the process does."""
    cache = runner.cache
    if not isinstance(cache, KVCache) or runner.device.type != "cpu" or own_rank().size > 1:
        return None
    return cache.give_back


def _checked_images(loaded: LoadedModel, runner: ModelRunner) -> ImageModel | None:
    """Return what encodes the model's images, if a prompt with one has the model's own logits; else log why not."""
    images = loaded.images
    if images is None or isinstance(images, str):  # the log has said why
        return None
    why = _why_no_images(images.check, runner)
    if not why:
        return images.model
    logger.warning("the model is served for text alone: its images cannot be read under the rolling batch: %s", why)
    return None


def _prepare(
    runner: ModelRunner, loaded: LoadedModel, options: RollingBatchOptions, step: StepSize
) -> tuple[SchedulerLimits, int]:
    """Allocate the KV cache; return what the scheduler may plan, and how many tokens a request may have."""
    limits, max_len = scheduler_limits(runner, loaded.max_len, loaded.weights, options, step)
    if runner.frequencies is None:
        refuse_unsteady_rope(loaded.model.config, max_len)
    with enough_for_steps(runner, limits.kv_tokens, step):
        drafted = 0 if options.speculative_draft_model is None else options.speculative_length
        decode_rows = limits.max_running * (1 + drafted)
        runner.prepare(limits.slots, max_len, decode_rows, limits.state_rows, limits.kv_tokens)
    return limits, max_len


def _why_no_images(check: ImageCheck, runner: ModelRunner) -> str:
    """Return why a prompt with an image is not computed as by the model itself; empty if it is."""
    try:
        difference = check.difference(runner.run, runner.cache.max_len, runner.page)
    # The border to the model's own code, and to kernels that attend to earlier tokens alone.
    except Exception as error:
        if is_out_of_memory(error) or is_device_failure(error):
            raise
        return f"its code raised {describe(error)}"
    runner.cache.trim(0, 0)
    if difference is None:
        return "one does not fit option.max_model_len"
    limit = 1e-3 if runner.dtype == torch.float32 else 0.25  # of the spread, as for text
    return "" if difference <= limit else f"the logits are off by {difference:.2g}"


def _speed_up_decoding(runner: ModelRunner, rows: int, options: RollingBatchOptions) -> dict[str, Any]:
    """Do what the options ask for, compilation first: graphs then record the compiled code. Return what was done."""
    done: dict[str, Any] = {}
    if options.enable_torch_compile:
        load_progress.report("compiling the model with torch")
        done["compiled"] = runner.compile(rows)
    if records_graphs(runner, options):
        load_progress.report("recording CUDA graphs")
        done["cuda_graphs"] = runner.capture(rows, CudaCapture)
    return done


@contextmanager
def _refusals(model: Any, refusal: type[ModelLoadError] = RollingBatchError) -> Iterator[None]:
    """Turn the errors of a model under the rolling batch into a `refusal` that names the other ways to serve it."""
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
    model_imports.finish_loading()
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


def _states_in_memory(runner: ModelRunner, rows: int) -> dict[str, Any]:
    """Return what the states of recurrent layers take, for the details."""
    if runner.states is None:
        return {}
    return {"states": rows, "states_gib": round(rows * runner.states.bytes_per_sequence / _GIB, 3)}


def _drafting_runner(loaded: LoadedModel, slots: int) -> ModelRunner | None:
    """Return the runner of the draft model, if there is one."""
    if loaded.draft is None:
        return None
    with _refusals(loaded.draft.model, ModelLoadError):
        drafting = loaded.draft.runner()
        if drafting.states is not None:
            raise UnsupportedAttentionError("a model that drafts tokens must not keep states, and its layers do")
        drafting.prepare(slots, loaded.draft.max_len)
    return drafting
