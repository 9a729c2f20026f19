"""The vllm handler: generates text under vLLM's own scheduler, in the worker's process or in processes of its own.

vLLM is imported when the model loads, never with this module. The directory `handlers/` itself must never be on
sys.path: `import vllm` would find this folder instead of the library.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from handlers.vllm.options import VllmEngineOptions
from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.generation import Delta, GenerationRequest
from lmi_server.contract.handler import LLMHandler, ModelInfo
from lmi_server.contract.protocol import Adapter

if TYPE_CHECKING:
    from handlers.vllm.engine import LoadedEngine


class VllmHandler(LLMHandler):
    """Serves a model directory, or a Hugging Face id, that vLLM can load."""

    def __init__(self) -> None:
        self._loaded: LoadedEngine
        self._request_numbers = itertools.count()

    async def start(self, model_dir: str, options: VllmEngineOptions) -> ModelInfo:
        """Load the model in other threads: importing vLLM alone would hold up the worker's heartbeats for seconds."""
        engine = await asyncio.to_thread(import_engine, "engine")
        loaded: LoadedEngine = await engine.load(model_dir, options)
        self._loaded = loaded
        return loaded.info

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one request."""
        loaded = self._loaded
        with loaded.adapters.using(request.adapter) as adapter:
            rendered = await loaded.prompts.render(request)
            builder, parser = loaded.delta_builder(request, rendered), rendered.parser
            # Clients choose their request ids, so two requests may have the same one. The engine's must be unique.
            engine_id = f"{next(self._request_numbers)}-{request.request_id}"
            deltas = loaded.driver.generate(engine_id, rendered.prompt, builder, request.priority, adapter)
            async with aclosing(deltas):
                async for delta in deltas:
                    yield delta if parser is None else parser.parse(delta)

    async def tokenize(self, request: GenerationRequest) -> list[int]:
        return list((await self._loaded.prompts.render(request)).prompt["prompt_token_ids"])

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return self._loaded.prompts.detokenize(list(tokens))

    def tokenizer(self) -> Any:
        return self._loaded.prompts.tokenizer

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self._loaded.adapters.registered

    async def add_adapter(self, adapter: Adapter) -> None:
        await self._loaded.adapters.add(adapter)

    async def remove_adapter(self, name: str) -> None:
        await self._loaded.adapters.remove(name)

    def metrics(self) -> bytes:
        return self._loaded.statistics.exposition()

    def stats(self) -> Mapping[str, float]:
        return self._loaded.statistics.gauges(self._loaded.driver.unfinished)

    async def stop(self) -> None:
        await self._loaded.driver.stop()


def import_engine(module: str) -> ModuleType:
    """Import a module of this folder that imports vLLM. Raises ModelLoadError if vLLM cannot be imported."""
    try:
        return import_module(f"handlers.vllm.{module}")
    except ImportError as error:
        raise ModelLoadError(
            f"the vllm handler needs vLLM ({error}); install vllm, or lmi-server[vllm] on a machine without GPU"
        ) from error
