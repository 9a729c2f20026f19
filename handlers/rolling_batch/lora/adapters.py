"""The LoRA adapters of a model under the rolling batch: loaded at registration, or by their first request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from lmi_server.contract.errors import RequestError
from lmi_server.contract.protocol import Adapter
from lmi_server.contract.texts.quoting import excerpt

if TYPE_CHECKING:
    from handlers.rolling_batch.engine import RollingBatchEngine
    from handlers.rolling_batch.lora.layers import LoraPair, LoraWeights
    from handlers.step_loop import StepLoop


class LoadedAdapters:
    """Adapters by name. Loaded weights stay in memory until the adapter is removed, so every adapter is pinned."""

    def __init__(self, loop: StepLoop[RollingBatchEngine]) -> None:
        self._loop = loop
        self.registered: dict[str, Adapter] = {}
        self._weights: dict[str, LoraWeights] = {}
        self._loading = asyncio.Lock()

    async def prepare(self) -> None:
        """Import the reader of adapters, which takes seconds: no request waits for it later."""
        await asyncio.to_thread(_import_reader)

    async def add(self, adapter: Adapter) -> None:
        """Register an adapter; it replaces one of the same name. Raises RequestError if the model cannot use it."""
        engine = self._loop.engine
        pairs = await asyncio.to_thread(_read, adapter.directory)
        weights = None
        if adapter.preload or adapter.pin:
            weights = await self._loop.call(lambda: engine.load_adapter(pairs))
        else:
            await self._loop.call(lambda: engine.check_adapter(pairs))
        replaced = self._weights.pop(adapter.name, None)
        self.registered[adapter.name] = adapter
        if weights is not None:
            self._weights[adapter.name] = weights
        await self._forget(replaced)

    async def remove(self, name: str) -> None:
        """Forget an adapter, if there is one of that name."""
        self.registered.pop(name, None)
        await self._forget(self._weights.pop(name, None))

    async def _forget(self, weights: LoraWeights | None) -> None:
        if weights is not None:
            await self._loop.call(lambda: self._loop.engine.forget_adapter(weights))

    async def weights(self, name: str) -> LoraWeights:
        """Return the weights of an adapter; load them if necessary. Raises RequestError for an unknown name."""
        loaded = self._weights.get(name)
        if loaded is not None:
            return loaded
        async with self._loading:  # several first requests load it once
            return self._weights.get(name) or await self._load(name)

    async def _load(self, name: str) -> LoraWeights:
        adapter = self.registered.get(name)
        if adapter is None:
            raise RequestError(f"The adapter {excerpt(name)} has not been registered")
        pairs = await asyncio.to_thread(_read, adapter.directory)
        weights = await self._loop.call(lambda: self._loop.engine.load_adapter(pairs))
        if self.registered.get(name) is adapter:  # else it was removed or replaced meanwhile: for this request only
            self._weights[name] = weights
        else:
            await self._forget(weights)
        return weights


def _import_reader() -> None:
    from handlers.rolling_batch.lora import checkpoint as lora_checkpoint  # noqa: F401


def _read(directory: str) -> dict[str, LoraPair]:
    from handlers.rolling_batch.lora.checkpoint import read_adapter

    return read_adapter(directory)
