"""Makes vLLM's configuration of an engine from the options: its arguments, and on the CPU the size of the KV cache."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from pydantic import ValidationError

from handlers.vllm import library
from handlers.vllm.description import VllmMemory
from handlers.vllm.engine_fields import SWITCH_VALUES
from handlers.vllm.options import VllmEngineOptions
from handlers.vllm.requests.rendering import error_message
from lmi_server.contract.errors import ModelLoadError
from lmi_server.machine.memory import free_and_total

# The errors of vLLM for unusable arguments and models; some of its checks are assertions.
_LOAD_ERRORS: tuple[type[Exception], ...] = (
    ValidationError,
    ValueError,
    TypeError,
    NotImplementedError,
    OSError,
    ImportError,
    AssertionError,
    RuntimeError,
)
_OF_EXPERTS = ("experts_int8", "int8_per_channel_weight_only")
IN_STATIC_BATCHES = "; option.rolling_batch=disable serves a model of transformers in static batches"


@contextmanager
def load_errors(problem: str, *others: type[Exception]) -> Iterator[None]:
    """Raise ModelLoadError with `problem` and vLLM's own message in the place of what vLLM raises, or of `others`."""
    try:
        yield
    except (*_LOAD_ERRORS, *others) as error:
        raise ModelLoadError(f"{problem}: {error_message(error)}{_remedy(error)}") from error


def _remedy(error: Exception) -> str:
    """Return the end of the message about a model that cannot be imported, whose reason vLLM leaves to its log, or one
    that lacks a kernel for this device: torch's error names the kernel and the data type.
    """
    if " not implemented for '" in str(error):
        return IN_STATIC_BATCHES
    unimported = isinstance(error, ImportError) or "failed to be inspected" in str(error)
    if not unimported or find_spec("torchvision") is not None:
        return ""
    return "; most models of images need torchvision: install it in the version that fits torch"


def create_engine_config(model_dir: str, options: VllmEngineOptions) -> Any:
    """Return vLLM's configuration of the whole engine (VllmConfig).

    Raises ModelLoadError if vLLM refuses an argument or the model.
    """
    library.refuse_unknown_interface()
    if library.is_on_cpu():
        library.inspect_models_in_this_process()
    arguments = engine_arguments(model_dir, options)
    with load_errors("vLLM refuses the configuration"):
        config = library.AsyncEngineArgs(**arguments).create_engine_config()
    if arguments.get("quantization") in _OF_EXPERTS and not config.model_config.get_num_experts():
        raise ModelLoadError(
            f"option.quantize={arguments['quantization']}: vLLM quantises the experts of a mixture with it, and this"
            " model has none; remove it, or use option.rolling_batch=scheduler with option.dtype=int8 in its place"
        )
    if library.is_on_cpu() and config.cache_config.kv_cache_memory_bytes is None:
        config.cache_config.kv_cache_memory_bytes = _kv_cache_bytes(config, options)
    return config


def engine_arguments(model_dir: str, options: VllmEngineOptions) -> dict[str, Any]:
    """Return the arguments of vLLM's AsyncEngineArgs. Raises ModelLoadError if the text of one cannot be parsed."""
    return {"model": model_dir, **options.engine_arguments(), **_parse_texts(options.passed_to_engine())}


def _parse_texts(texts: Mapping[str, str]) -> dict[str, Any]:
    """Parse arguments that serving.properties gives by vLLM's own names, with vLLM's own command-line parser.

    So every argument of the installed version works, with the types and the checks that vLLM has for it. Raises
    ModelLoadError with the parser's message.
    """
    if not texts:
        return {}
    parser = library.AsyncEngineArgs.add_cli_args(_Parser(allow_abbrev=False))
    actions = {action.dest: action for action in parser._actions}
    not_configurable = sorted(texts.keys() - actions.keys())
    if not_configurable:
        raise ModelLoadError(
            f"option.{not_configurable[0]} is internal to vLLM and cannot be configured; remove the key"
        )
    words = [word for name, text in texts.items() for word in _command_line(actions[name], name, text)]
    parsed = parser.parse_args(words)
    return {name: getattr(parsed, name) for name in texts}


def _command_line(action: argparse.Action, name: str, text: str) -> list[str]:
    """Return the words of the command line that set one argument; a switch is --name or --no-name."""
    if action.nargs != 0:
        return [f"--{name.replace('_', '-')}", text]
    switch = SWITCH_VALUES.get(text.lower())
    if switch is None:
        raise ModelLoadError(f"option.{name}={text} is not allowed; allowed: true or false")
    return [option for option in action.option_strings if option.startswith("--no-") is not switch][:1]


class _Parser(library.FlexibleArgumentParser):
    """vLLM's command-line parser, with an exception in the place of the end of the process."""

    def error(self, message: str) -> Any:
        raise ModelLoadError(f"vLLM refuses an engine argument: {message}")


def _kv_cache_bytes(config: Any, options: VllmEngineOptions) -> int | None:
    """Return the bytes of KV cache per process that computes, on a machine without a GPU; None lets vLLM decide."""
    per_request = config.model_config.max_model_len * library.bytes_per_token(config)
    all_requests = config.scheduler_config.max_num_seqs * per_request
    free = free_and_total()[0] // config.parallel_config.world_size
    return VllmMemory(options).reserved_kv_bytes(all_requests, per_request, free)
