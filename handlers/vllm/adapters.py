"""The LoRA adapters of a model under vLLM, by the names that requests use."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from handlers.vllm import library
from handlers.vllm.drivers import Driver
from handlers.vllm.requests import plain
from lmi_server.contract.errors import RequestError
from lmi_server.contract.protocol import Adapter

_REFUSALS = (ValueError, TypeError, KeyError, RuntimeError, OSError, AssertionError, library.VLLMError)


class Adapters:
    """Adapters of a loaded engine. vLLM keeps their weights, as many as option.max_cpu_loras says."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._numbers = itertools.count(1)
        self._by_name: dict[str, library.LoRARequest] = {}
        self._users: Counter[int] = Counter()
        self._retired: dict[int, library.LoRARequest] = {}
        self._forgetting: set[asyncio.Task[None]] = set()

    async def add(self, adapter: Adapter) -> None:
        """Take an adapter in the place of one of its name. Raises RequestError where vLLM cannot use it.

        It is loaded in any case: vLLM's core does not outlive an adapter that fails in the middle of a step.
        """
        number = next(self._numbers)
        # vLLM finds KV cache again by the adapter's name, so one that replaces another has a name of its own.
        name = adapter.name if adapter.name not in self._by_name else f"{adapter.name}#{number}"
        loaded = library.LoRARequest(name, number, adapter.directory)
        try:
            await self._driver.add_lora(loaded)
            if adapter.pin:
                await self._driver.pin_lora(number)
            elif not adapter.preload:
                await self._driver.remove_lora(number)
        except _REFUSALS as error:
            raise RequestError(f"vLLM cannot use the adapter {adapter.name}: {plain(error)}") from error
        replaced = self._by_name.get(adapter.name)
        self._by_name[adapter.name] = loaded
        await self._retire(replaced)

    async def remove(self, name: str) -> None:
        """Forget an adapter; nothing happens where there is none."""
        await self._retire(self._by_name.pop(name, None))

    @contextmanager
    def using(self, name: str | None) -> Iterator[Any]:
        """Hold the adapter of a request, None for the model as it is. Raises RequestError where there is none."""
        if name is None:
            yield None
            return
        held = self._by_name.get(name)
        if held is None:
            raise RequestError(f"The adapter {name} has not been registered")
        number = held.lora_int_id
        self._users[number] += 1
        try:
            yield held
        finally:
            self._users[number] -= 1
            if not self._users[number] and self._retired.pop(number, None):
                task = asyncio.create_task(self._driver.remove_lora(number))
                self._forgetting.add(task)
                task.add_done_callback(self._forgetting.discard)

    async def _retire(self, replaced: Any) -> None:
        """Forget the weights of an adapter once no request uses them: vLLM would read them again from its directory."""
        if replaced is None:
            return
        number = replaced.lora_int_id
        if self._users[number]:
            self._retired[number] = replaced
        else:
            await self._driver.remove_lora(number)
