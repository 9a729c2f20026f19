"""Loads a model with vLLM: engine arguments from the options, KV cache by the machine, errors in plain words."""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ValidationError

from handlers.step_loop import StepLoop
from handlers.vllm import library, ranks
from handlers.vllm.adapters import Adapters
from handlers.vllm.chats import ParsedChats, Rendered
from handlers.vllm.compilation import BackgroundCompilation
from handlers.vllm.drivers import Driver, InProcessDriver, InProcessEngine, OwnProcessDriver, end_process
from handlers.vllm.options import VllmEngineOptions
from handlers.vllm.outputs import Answer, Vocabulary
from handlers.vllm.requests import PromptRenderer, plain, sampling_params
from handlers.vllm.statistics import Statistics
from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.generation import Feature, GenerationRequest
from lmi_server.contract.handler import ModelInfo
from lmi_server.machine.environment import own_rank, process_environment
from lmi_server.machine.memory import free_and_total

T = TypeVar("T")

_log = logging.getLogger(__name__)

_GIB = 2**30
_FEATURES: frozenset[Feature] = frozenset(
    {"structured_outputs", "tools", "reasoning", "min_tokens", "bad_words", "allowed_token_ids", "engine_extras"}
)
_TRUE_OR_FALSE = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}
# What vLLM raises for arguments and models that it cannot take; some of its checks are assertions.
_REFUSALS = (ValidationError, ValueError, TypeError, NotImplementedError, OSError, AssertionError, RuntimeError)


def engine_config(model_dir: str, options: VllmEngineOptions) -> Any:
    """Return vLLM's configuration of the whole engine.

    Raises ModelLoadError with vLLM's own words where it refuses an argument or the model.
    """
    library.warn_of_unknown_version()
    arguments = _engine_arguments(model_dir, options)
    try:
        config = library.AsyncEngineArgs(**arguments).create_engine_config()
    except _REFUSALS as error:
        raise ModelLoadError(f"vLLM refuses the configuration: {plain(error)}") from error
    if library.is_on_cpu() and config.cache_config.kv_cache_memory_bytes is None:
        config.cache_config.kv_cache_memory_bytes = _kv_cache_bytes(config, options)
    return config


def _engine_arguments(model_dir: str, options: VllmEngineOptions) -> dict[str, Any]:
    return {"model": model_dir, **options.engine_arguments(), **_from_text(options.passed_to_engine())}


def _from_text(given: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments of vLLM that serving.properties gives by vLLM's own names, read as its command line reads them.

    Raises ModelLoadError with the command line's message.
    """
    if not given:
        return {}
    parser = library.AsyncEngineArgs.add_cli_args(_Parser(allow_abbrev=False))
    actions = {action.dest: action for action in parser._actions}
    internal = sorted(given.keys() - actions.keys())
    if internal:
        raise ModelLoadError(f"vLLM takes option.{internal[0]} from no configuration; remove the key")
    words = [word for name, raw in given.items() for word in _command_line(actions[name], name, raw)]
    parsed = parser.parse_args(words)
    return {name: getattr(parsed, name) for name in given}


def _command_line(action: argparse.Action, name: str, raw: str) -> list[str]:
    if action.nargs != 0:
        return [f"--{name.replace('_', '-')}", raw]
    switch = _TRUE_OR_FALSE.get(raw.lower())
    if switch is None:
        raise ModelLoadError(f"option.{name}={raw} is not allowed; allowed: true or false")
    return [option for option in action.option_strings if option.startswith("--no-") is not switch][:1]


class _Parser(library.FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser, which raises where a command line would end."""

    def error(self, message: str) -> Any:
        raise ModelLoadError(f"vLLM refuses an engine argument: {message}")


def _kv_cache_bytes(config: Any, options: VllmEngineOptions) -> int | None:
    """Return the bytes of KV cache of each process that computes, on a machine without GPU; None where vLLM decides."""
    least = config.model_config.max_model_len * library.bytes_per_token(config)
    wanted = config.scheduler_config.max_num_seqs * least
    free = free_and_total()[0] // config.parallel_config.world_size
    return options.reserved_kv_bytes(wanted, least, free)


@dataclass(frozen=True)
class LoadedEngine:
    """An engine that runs, and what its requests need."""

    driver: Driver
    adapters: Adapters
    prompts: PromptRenderer
    vocabulary: Vocabulary
    statistics: Statistics
    info: ModelInfo

    def answer(self, request: GenerationRequest, rendered: Rendered) -> Answer:
        """Return what reads the outputs of `request`.

        Raises ContextLengthError or RequestError where the request cannot be served.
        """
        prompt, sampling = rendered.prompt, rendered.sampling
        ids = prompt["prompt_token_ids"]
        parameters = sampling_params(sampling, request.stream, len(ids), self.info.max_model_len)

        def prompt_text() -> str:
            return prompt.get("prompt") or self.vocabulary.decode(ids)

        return Answer(sampling, parameters, prompt_text, self.vocabulary)


async def load(model_dir: str, options: VllmEngineOptions) -> LoadedEngine:
    """Load the model as the options say.

    Raises ModelLoadError where vLLM refuses the configuration or cannot load the model.
    """
    began = time.perf_counter()
    statistics = Statistics()
    _prepare_adapters(options)
    template = None if options.chat_template is None else _chat_template(options.chat_template, Path(model_dir))
    library.silence_default_statistics()
    driver, engine = await (_load_in_worker if options.engine_process == "worker" else _load_apart)(
        model_dir, options, statistics
    )
    config, renderer = engine.vllm_config, engine.renderer
    statistics.set_capacity(library.kv_cache_tokens(config))
    tokenizer = renderer.get_tokenizer()
    max_model_len = config.model_config.max_model_len
    info = ModelInfo(
        max_model_len=max_model_len,
        features=_FEATURES | {"media"} if config.model_config.is_multimodal_model else _FEATURES,
        sampling_defaults=library.default_sampling(config),
        details=details(config, options, began),
    )
    chats = _parsed_chats(config, renderer, template, options)
    prompts = PromptRenderer(renderer, max_model_len, template, options.chat_template_content_format, chats)
    vocabulary = Vocabulary(tokenizer.decode, tokenizer.all_special_ids)
    return LoadedEngine(driver, Adapters(driver), prompts, vocabulary, statistics, info)


def _prepare_adapters(options: VllmEngineOptions) -> None:
    if not (options.enable_lora and library.is_on_cpu()):
        return
    if options.engine_process == "own":
        raise ModelLoadError(
            "option.engine_process=own with option.enable_lora=true would mix adapters up on the CPU; use worker"
        )
    library.keep_adapters_apart()


def _parsed_chats(
    config: Any, renderer: library.BaseRenderer, template: str | None, options: VllmEngineOptions
) -> ParsedChats:
    try:
        return ParsedChats(config, renderer, template, options)
    except (*_REFUSALS, KeyError) as error:
        raise ModelLoadError(
            f"option.tool_call_parser={options.tool_call_parser} or option.reasoning_parser={options.reasoning_parser}"
            f" cannot be used with this model: {plain(error)}"
        ) from error


def _chat_template(given: str, model_dir: Path) -> str:
    """Return a chat template that is given as a file, of the model directory too, or itself."""
    if "{" in given:
        return given
    file = model_dir / given  # an absolute name replaces model_dir
    if not file.is_file():
        raise ModelLoadError(f"option.chat_template={given} is no file, of the model directory {model_dir} neither")
    return file.read_text(encoding="utf-8")


async def _load_in_worker(
    model_dir: str, options: VllmEngineOptions, statistics: Statistics
) -> tuple[Driver, library.LLMEngine]:
    background: BackgroundCompilation | None = None

    def build() -> InProcessEngine:
        nonlocal background, options
        set_threads(options)
        environment = process_environment()
        in_background = library.is_on_cpu() and options.compiles_in_background
        if in_background and not library.can_keep_code():
            library.compile_nothing()
            options, in_background = options.model_copy(update={"enforce_eager": True}), False
        config = engine_config(model_dir, options)
        if in_background:
            arguments, kv_bytes = _engine_arguments(model_dir, options), library.least_kv_bytes(config)
            models = library.serve_before_compiled(config)
            background = BackgroundCompilation(arguments, kv_bytes, models, environment)
        elif library.is_on_cpu() and not options.runs_uncompiled and not own_rank().directory:
            library.use_stored_code(config)
        is_group = bool(own_rank().directory)
        make = library.leading_engine if is_group else library.in_process_engine
        engine = loaded(lambda: make(config, [statistics.logger_factory]))
        library.on_lost_worker(engine, end_process)
        if is_group:
            ranks.lead(engine)
        return InProcessEngine(engine)

    loop = StepLoop(build)
    stepped = await loop.start()
    if background is not None:
        background.start()
    return InProcessDriver(loop, background), stepped.engine


def follow(model_dir: str, options: VllmEngineOptions) -> None:
    """Be one of the other ranks of the group whose rank 0 runs `load`, until that one stops its engine.

    Raises ModelLoadError where vLLM refuses the configuration or cannot load the model.
    """
    _prepare_adapters(options)
    set_threads(options)
    config = engine_config(model_dir, options)
    ranks.follow(loaded(lambda: library.following_core(config)))


async def _load_apart(
    model_dir: str, options: VllmEngineOptions, statistics: Statistics
) -> tuple[Driver, library.AsyncLLM]:
    config = await asyncio.to_thread(engine_config, model_dir, options)
    engine = await asyncio.to_thread(loaded, lambda: library.own_process_engine(config, [statistics.logger_factory]))
    return OwnProcessDriver(engine), engine


def set_threads(options: VllmEngineOptions) -> None:
    """Compute on as many threads as the options say, where they do, for an engine in this process."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)


def loaded(build: Callable[[], T]) -> T:
    """Return what `build` makes. Raises ModelLoadError in plain words where vLLM cannot load the model."""
    try:
        return build()
    except _REFUSALS as error:
        raise ModelLoadError(f"vLLM cannot load the model: {plain(error)}") from error


def details(config: Any, options: VllmEngineOptions, began: float) -> dict[str, Any]:
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
