"""Loads a model that generates text with vLLM, in the worker's process or in processes of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from handlers.chats.templates import AUTO
from handlers.checkpoints.adapter_layers import AdapterCheck
from handlers.checkpoints.chat_template import read_chat_template, with_prompt_beginning
from handlers.ranks.communicator import Communicator
from handlers.step_loop import StepLoop
from handlers.vllm import library
from handlers.vllm.compilation import stored_code
from handlers.vllm.compilation.background import BackgroundCompilation
from handlers.vllm.engine import ranks
from handlers.vllm.engine.adapters import Adapters
from handlers.vllm.engine.configuration import IN_STATIC_BATCHES, create_engine_config, engine_arguments, load_errors
from handlers.vllm.engine.drivers import Driver, InProcessDriver, InProcessEngine, OwnProcessDriver, end_process
from handlers.vllm.engine.statistics import Statistics
from handlers.vllm.options import VllmEngineOptions
from handlers.vllm.requests import media  # noqa: F401 - registers who fetches media
from handlers.vllm.requests.chats import ChatRenderer, RenderedRequest, ToolParser, tool_parser
from handlers.vllm.requests.outputs import DeltaBuilder, Vocabulary
from handlers.vllm.requests.rendering import PromptRenderer, sampling_params
from lmi_server.contract.errors import ModelLoadError, describe
from lmi_server.contract.generation import Feature, GenerationRequest
from lmi_server.contract.handler import ModelInfo
from lmi_server.machine.environment import own_rank, process_environment
from lmi_server.processes import load_progress, model_imports, spawned

logger = logging.getLogger(__name__)

_WARM_UP = "warm-up"
CANNOT_LOAD = "vLLM cannot load the model"
_GIB = 2**30
_FEATURES: frozenset[Feature] = frozenset(
    {
        "structured_outputs",
        "tools",
        "min_tokens",
        "bad_words",
        "allowed_token_ids",
        "beam_search",
        "engine_extras",
    }
)


@dataclass(frozen=True)
class LoadedEngine:
    """A running engine, and what its requests need."""

    driver: Driver
    adapters: Adapters
    prompts: PromptRenderer
    vocabulary: Vocabulary
    statistics: Statistics
    info: ModelInfo
    ends: frozenset[int]  # the tokens that end a sequence
    own_grammars: bool  # whether vLLM takes constraints as grammars in llguidance's form
    json_style: Mapping[str, bool]  # of all constraints, see library.json_style
    may_sleep: bool  # whether the weights can leave the device and come back

    def delta_builder(self, request: GenerationRequest, rendered: RenderedRequest) -> DeltaBuilder:
        """Return what builds the deltas of `request` from the engine's outputs.

        Raises ContextLengthError if prompt and new tokens do not fit, RequestError if vLLM refuses a parameter.
        """
        prompt, sampling = rendered.prompt, rendered.sampling
        ids = prompt["prompt_token_ids"]
        parameters = sampling_params(sampling, request.stream, len(ids), self.info.max_model_len)

        def prompt_text() -> str:
            return prompt.get("prompt") or self.vocabulary.decode(ids)

        return DeltaBuilder(sampling, parameters, prompt_text, self.vocabulary)


async def load(model_dir: str, options: VllmEngineOptions) -> LoadedEngine:
    """Load a model. Raises ModelLoadError if vLLM refuses the configuration or cannot load the model."""
    began = time.perf_counter()
    statistics = Statistics()
    _prepare_adapters(options)
    template = None if options.chat_template is None else read_chat_template(options.chat_template, Path(model_dir))
    library.silence_default_statistics()
    load_engine = _load_in_worker if options.engine_process == "worker" else _load_in_own_process
    driver, engine = await load_engine(model_dir, options, statistics)
    config, renderer = engine.vllm_config, engine.renderer
    statistics.set_capacity(library.kv_cache_tokens(config))
    tokenizer = renderer.get_tokenizer()
    max_model_len = config.model_config.max_model_len
    template = None if template is None else with_prompt_beginning(template, tokenizer)
    chats = _chat_renderer(config, renderer, template, options)
    info = ModelInfo(
        max_model_len=max_model_len,
        features=_features(config),
        sampling_defaults=library.default_sampling(config),
        details={**engine_details(config, options, began), "tool_call_parser": chats.tools.name or "none"},
    )
    prompts = PromptRenderer(renderer, max_model_len, template, options.chat_template_content_format, chats)
    vocabulary = Vocabulary(tokenizer.decode, tokenizer.all_special_ids)
    adapters = Adapters(driver, AdapterCheck(config.model_config.hf_config, config.model_config.dtype))
    ends = library.end_tokens(config, tokenizer)
    named = "structured_outputs_config" in options.passed_to_engine()
    own_grammars = library.compiles_own_grammars(config, tokenizer, named)
    style = library.json_style(config)
    may_sleep = bool(config.model_config.enable_sleep_mode) and not own_rank().directory
    return LoadedEngine(driver, adapters, prompts, vocabulary, statistics, info, ends, own_grammars, style, may_sleep)


def _features(config: Any) -> frozenset[Feature]:
    further: dict[Feature, bool] = {
        "media": config.model_config.is_multimodal_model,
        "reasoning": library.limits_reasoning(config),
    }
    return _FEATURES | {feature for feature, has in further.items() if has}


def follow(model_dir: str, options: VllmEngineOptions) -> None:
    """Load this rank's part of the model and repeat rank 0's calls, until rank 0 (which runs `load`) stops.

    Raises ModelLoadError if vLLM refuses the configuration or cannot load the model.
    """
    _prepare_adapters(options)
    set_threads(options)
    config = create_engine_config(model_dir, options)
    with load_errors(CANNOT_LOAD):
        core = ranks.following_core(config)
    model_imports.finish_loading()
    ranks.follow(core, Communicator(own_rank()))


def set_threads(options: VllmEngineOptions) -> None:
    """Set the number of threads of an operation on the CPU, for an engine in this process."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)


def engine_details(config: Any, options: VllmEngineOptions, began: float) -> dict[str, Any]:
    """Return what was decided for the loaded engine, for the log and for `explain`."""
    cache, scheduler = config.cache_config, config.scheduler_config
    return {
        "engine": f"vLLM {library.version()}",
        "engine_process": options.engine_process,
        "model": ", ".join(config.model_config.architectures),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "device": config.device_config.device_type,
        "threads": torch.get_num_threads(),
        "enforce_eager": config.model_config.enforce_eager,
        "max_model_len": config.model_config.max_model_len,
        "max_rolling_batch_size": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "kv_cache_tokens": library.kv_cache_tokens(config),
        "kv_cache_gib": round((cache.kv_cache_memory_bytes or 0) / _GIB, 3),
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "load_seconds": round(time.perf_counter() - began, 1),
    }


def _prepare_adapters(options: VllmEngineOptions) -> None:
    if not (options.enable_lora and library.is_on_cpu()):
        return
    if options.engine_process == "own":
        # The fix of vLLM's kernels holds for this process only.
        raise ModelLoadError(
            "option.engine_process=own with option.enable_lora=true would mix adapters up on the CPU; use worker"
        )
    library.keep_adapters_apart()


def _chat_renderer(
    config: Any, renderer: library.BaseRenderer, template: str | None, options: VllmEngineOptions
) -> ChatRenderer:
    tools = tool_parser(renderer.get_tokenizer(), template, options)

    def make(tools: ToolParser) -> ChatRenderer:
        parsers = f"option.tool_call_parser={tools.name} or option.reasoning_parser={options.reasoning_parser}"
        # KeyError: vLLM knows no such parser, or the tokenizer lacks a token that it needs.
        with load_errors(f"{parsers} cannot be used with this model", KeyError):
            return ChatRenderer(config, renderer, template, options, tools)

    try:
        return make(tools)
    except ModelLoadError as error:
        if options.tool_call_parser != AUTO or tools.name is None:
            raise
        logger.warning("requests with tools are refused: %s", error.message)
        return make(ToolParser(None, error.message))


async def _load_in_worker(
    model_dir: str, options: VllmEngineOptions, statistics: Statistics
) -> tuple[Driver, library.LLMEngine]:
    loop = StepLoop(lambda: _build_in_worker(model_dir, options, statistics))
    stepped = await loop.start()
    if stepped.compilation is not None:
        stepped.compilation.start(lambda: stepped.has_work)
    return InProcessDriver(loop), stepped.engine


def _build_in_worker(model_dir: str, options: VllmEngineOptions, statistics: Statistics) -> InProcessEngine:
    set_threads(options)
    environment = process_environment()  # before vLLM writes into it; see stored_code.compile_models
    if library.is_on_cpu() and options.compiles_in_background and not stored_code.can_store_code():
        stored_code.disable_compilation()
        options = options.model_copy(update={"enforce_eager": True})
    config = create_engine_config(model_dir, options)
    is_group = bool(own_rank().directory)
    compilation = None if is_group else _prepare_compiled_code(model_dir, config, options, environment)
    make_engine = ranks.leading_engine if is_group else library.in_process_engine
    load_progress.report("loading the model with vLLM")
    with load_errors(CANNOT_LOAD):
        engine = make_engine(config, [statistics.logger_factory])
    library.on_lost_worker(engine, end_process)
    if _can_warm_up(config):
        load_progress.report("warming up")
        with _first_request(), library.without_metrics(engine):
            engine.add_request(_WARM_UP, *library.short_request())
            while engine.get_num_unfinished_requests():
                engine.step()
    return InProcessEngine(engine, compilation)


def _prepare_compiled_code(
    model_dir: str, config: Any, options: VllmEngineOptions, environment: Mapping[str, str]
) -> BackgroundCompilation | None:
    """Let the models of `config` use stored code on the CPU; return what compiles them in the background, if anything.

    This comes before they load, because vLLM decides at their first forward pass.
    """
    if not library.is_on_cpu() or options.runs_uncompiled:
        return None
    if not options.compiles_in_background:
        stored_code.use_stored_code(config)
        return None
    models = stored_code.serve_before_compiled(config)
    arguments = engine_arguments(model_dir, options)
    return BackgroundCompilation(arguments, library.min_kv_bytes(config), models, environment)


async def _load_in_own_process(
    model_dir: str, options: VllmEngineOptions, statistics: Statistics
) -> tuple[Driver, library.AsyncLLM]:
    def build(config: Any) -> library.AsyncLLM:
        load_progress.report("loading the model with vLLM")
        with load_errors(CANNOT_LOAD):
            return library.own_process_engine(config, [statistics.logger_factory])

    config = await asyncio.to_thread(create_engine_config, model_dir, options)
    spawned.prepare_imports()
    engine = await asyncio.to_thread(build, config)
    if _can_warm_up(config):
        load_progress.report("warming up")
        with _first_request():
            async for _ in engine.generate(*library.short_request(), _WARM_UP):
                pass
    return OwnProcessDriver(engine), engine


def _can_warm_up(config: Any) -> bool:
    """Return whether two tokens of text are a prompt: a model with an encoder wants its input, too."""
    return not config.model_config.is_encoder_decoder and config.model_config.max_model_len >= 2 * library.SHORT


@contextmanager
def _first_request() -> Iterator[None]:
    """Refuse a model whose first request fails: it lacks a kernel for this device, and would end each worker."""
    try:
        yield
    except Exception as error:  # the border to the code of any model
        raise ModelLoadError(
            f"{CANNOT_LOAD}: its first request failed: {describe(error)}{IN_STATIC_BATCHES}"
        ) from error
