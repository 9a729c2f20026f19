"""The tensorrt_llm handler: generates text under TensorRT-LLM's own scheduler, which runs in processes of its own.

TensorRT-LLM is imported when the model loads, never with this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from handlers.tensorrt_llm.options import TensorRtLlmOptions
from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.generation import Delta, GenerationRequest
from lmi_server.contract.handler import LLMHandler, ModelInfo
from lmi_server.contract.protocol import Adapter

if TYPE_CHECKING:
    from handlers.tensorrt_llm.engine import Engine


class TensorRtLlmHandler(LLMHandler):
    """Serves a model directory, a Hugging Face id or a built engine that TensorRT-LLM can load."""

    def __init__(self) -> None:
        self._engine: Engine

    async def start(self, model_dir: str, options: TensorRtLlmOptions) -> ModelInfo:
        """Load the model in other threads: importing TensorRT-LLM alone would hold up the worker's heartbeats."""
        engine = await asyncio.to_thread(_import_engine)
        self._engine, info = await engine.load(model_dir, options)
        return info  # type: ignore[no-any-return]

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one request."""
        return self._engine.generate(request)

    async def tokenize(self, request: GenerationRequest) -> list[int]:
        return await self._engine.count(request)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return await self._engine.prompts.detokenize(tokens)

    def tokenizer(self) -> Any:
        return self._engine.prompts.tokenizer

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self._engine.adapters.registered

    async def add_adapter(self, adapter: Adapter) -> None:
        await self._engine.adapters.add(adapter)

    async def remove_adapter(self, name: str) -> None:
        self._engine.adapters.remove(name)

    def stats(self) -> Mapping[str, float]:
        return self._engine.statistics.gauges()

    async def stop(self) -> None:
        await self._engine.stop()


def _import_engine() -> Any:
    """Import the modules that import TensorRT-LLM. Raises ModelLoadError if it cannot be imported."""
    try:
        return import_module("handlers.tensorrt_llm.engine")
    except ImportError as error:
        raise ModelLoadError(
            f"the tensorrt_llm handler needs NVIDIA's package tensorrt_llm ({error}); on a machine with an NVIDIA GPU"
            " run: pip install tensorrt-llm"
        ) from error
