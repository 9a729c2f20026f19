"""Refuses what belongs to LMI's own worker and its engines: the error says what to set instead. Not LMI's module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

_WRAP = "; handle() in the model.py beside it gets each request first, and the built-in handler the rest"
VLLM = f"set option.entryPoint=djl_python.lmi_vllm.vllm_async_service{_WRAP}"
VLLM_FORMATS = (
    "option.entryPoint=djl_python.lmi_vllm.vllm_async_service answers in this form; a function with @output_formatter"
    " in model.py changes its answers"
)
VLLM_BATCH = (
    "set option.rolling_batch=vllm without an entry point of your own; code that batches itself derives from"
    " djl_python.rolling_batch.rolling_batch.RollingBatch"
)
TENSORRT_LLM = f"set option.rolling_batch=trtllm{_WRAP}"


def not_here(name: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"{name} is part of LMI's own worker, which this server does not have; {instead}")


def function_not_here(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a function that can be imported and refuses to be called."""

    def call(*arguments: Any, **keywords: Any) -> NoReturn:
        not_here(name, instead)

    call.__name__ = call.__qualname__ = name
    return call


class ServiceNotHere:
    """A service of LMI's that can be imported and made. Whatever of it is called refuses."""

    instead: ClassVar[str]

    def __init__(self) -> None:
        self.initialized = False

    def initialize(self, properties: Any) -> NoReturn:
        not_here(f"{type(self).__name__}.initialize", self.instead)

    def inference(self, inputs: Any) -> NoReturn:
        not_here(f"{type(self).__name__}.inference", self.instead)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        not_here(f"{type(self).__name__}.{name}", self.instead)
