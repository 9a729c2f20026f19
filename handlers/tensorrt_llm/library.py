"""The handler's names of TensorRT-LLM (1.0 to 1.4), and functions that hide its internal interfaces.

Only this module imports the package, so a new version of TensorRT-LLM changes only this one. The package has up to two
classes LLM: the top level's runs models on PyTorch, `_tensorrt_engine`'s runs engines of TensorRT.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import tensorrt_llm
from tensorrt_llm import llmapi
from tensorrt_llm.executor import CppExecutorError as CppExecutorError
from tensorrt_llm.llmapi import GuidedDecodingParams as GuidedDecodingParams
from tensorrt_llm.llmapi import LoRARequest as LoRARequest
from tensorrt_llm.llmapi import RequestError as RequestError
from tensorrt_llm.llmapi import SamplingParams as SamplingParams

from lmi_server.contract.errors import ModelLoadError

_ALGORITHMS = ("quant_algo", "kv_cache_quant_algo")
# The classes of nested arguments, found late: no version has all. Other mappings are passed on, and pydantic converts.
_CLASSES = {
    "kv_cache_config": "KvCacheConfig",
    "scheduler_config": "SchedulerConfig",
    "calib_config": "CalibConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "moe_config": "MoeConfig",
    "extended_runtime_perf_knob_config": "ExtendedRuntimePerfKnobConfig",
    "quant_config": "QuantConfig",
    "build_config": "BuildConfig",
    "lora_config": "LoraConfig",
}


def version() -> str:
    """Return the version of the package."""
    return str(tensorrt_llm.__version__)


def make_llm(backend: str, arguments: Mapping[str, Any]) -> Any:
    """Return the running engine: converts, quantises and builds first, if the model is not built yet.

    Raises ModelLoadError if this version lacks the backend, and whatever TensorRT-LLM raises.
    """
    return _llm_class(backend)(**{name: _argument(name, value) for name, value in arguments.items()})


def _llm_class(backend: str) -> Any:
    if backend == "pytorch":
        return tensorrt_llm.LLM
    try:
        return importlib.import_module("tensorrt_llm._tensorrt_engine").LLM
    except ImportError as error:
        raise ModelLoadError(
            f"TensorRT-LLM {version()} has no engines of TensorRT any more ({error}); remove option.backend"
        ) from error


def _argument(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping) or name not in _CLASSES:
        return dict(value) if isinstance(value, Mapping) else value
    if name == "build_config":
        return _build_config(value)
    values = {key: _algorithm(key, inner) for key, inner in value.items()} if name == "quant_config" else value
    return _make_nested(name, values)


def _make_nested(name: str, values: Mapping[str, Any]) -> Any:
    """Return a nested argument. Raises ModelLoadError for a name that this version does not have."""
    cls = _class(_CLASSES[name])
    known = getattr(cls, "model_fields", None) or getattr(cls, "__dataclass_fields__", None)
    unknown = [] if known is None else sorted(values.keys() - set(known))
    if unknown:
        raise ModelLoadError(f"TensorRT-LLM {version()} has no {name}.{unknown[0]}; remove option.{unknown[0]}")
    return cls(**values)


def _class(name: str) -> Any:
    """Return a class of arguments. LoraConfig is in another module, by the version."""
    for module in ("llmapi", "lora_helper", "lora_manager"):
        try:
            return getattr(importlib.import_module(f"tensorrt_llm.{module}"), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise ModelLoadError(f"TensorRT-LLM {version()} has no {name}; remove the keys that need it")


def _build_config(values: Mapping[str, Any]) -> Any:
    """Return the configuration of the build; plugins are attributes of an object that it makes itself."""
    plugins = values.get("plugin_config", {})
    config = _make_nested(
        "build_config", {name: _argument(name, value) for name, value in values.items() if name != "plugin_config"}
    )
    for name, value in plugins.items():
        if not hasattr(config.plugin_config, name):
            raise ModelLoadError(f"TensorRT-LLM {version()} has no plugin setting {name}; remove its key")
        setattr(config.plugin_config, name, value)
    return config


def _algorithm(name: str, value: Any) -> Any:
    if name not in _ALGORITHMS:
        return value
    if value not in llmapi.QuantAlgo.__members__:
        known = ", ".join(llmapi.QuantAlgo.__members__)
        raise ModelLoadError(f"option.{name}={value} is not allowed; allowed: {known}")
    return llmapi.QuantAlgo[value]


def tokenizer(llm: Any) -> Any:
    """Return the tokenizer with transformers' interface; None if the engine has none."""
    return getattr(llm.tokenizer, "tokenizer", llm.tokenizer)


def max_seq_len(llm: Any) -> int | None:
    """Return the tokens of prompt and output together that the engine was built or loaded for."""
    sizes = getattr(llm.args, "build_config", None)
    found = getattr(sizes, "max_seq_len", None) or getattr(llm.args, "max_seq_len", None)
    return None if found is None else int(found)


def is_dead(llm: Any) -> bool:
    """Return whether the engine has ended; it takes no further request then."""
    executor = llm._executor
    return executor is None or bool(executor.is_shutdown())


def report_chosen_logprobs(parameters: SamplingParams) -> None:
    """Have an engine of TensorRT report the log probability of each chosen token, without keeping all logits.

    TensorRT-LLM's own server does the same; there is no public parameter for it.
    """
    parameters._return_log_probs = True


async def statistics(llm: Any, timeout_s: float) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the statistics of each iteration of the engine, until none comes for `timeout_s` seconds."""
    async for values in llm.get_stats_async(timeout=timeout_s):
        yield values
