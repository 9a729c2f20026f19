"""The LoRA adapters of a model under vLLM, by the names that requests use."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from handlers.vllm import library
from handlers.vllm.engine.drivers import Driver
from handlers.vllm.requests.rendering import error_message
from lmi_server.contract.errors import RequestError
from lmi_server.contract.protocol import Adapter
from lmi_server.contract.texts.quoting import excerpt

# The errors of vLLM for an unusable adapter. It has no error type of its own for most of these cases.
_ADAPTER_ERRORS = (ValueError, TypeError, KeyError, RuntimeError, OSError, AssertionError, library.VLLMError)


class Adapters:
    """Adapters of a loaded engine. vLLM keeps their weights, `option.max_cpu_loras` of them in main memory.

    vLLM identifies an adapter by a number, and reads its weights again from its directory if a request names a number
    whose weights are gone. So an adapter that is replaced or removed keeps its weights until its last request ends:
    the directory may hold other weights by then.
    """

    def __init__(self, driver: Driver, check: Callable[[str], None]) -> None:
        """`check` takes the directory of an adapter, and raises RequestError if the model lacks its layers."""
        self._driver = driver
        self._check = check
        self._numbers = itertools.count(1)
        self.registered: dict[str, Adapter] = {}
        self._by_name: dict[str, library.LoRARequest] = {}  # those of `registered`, as vLLM knows them
        self._users: Counter[int] = Counter()  # requests that run, by the number of their adapter
        self._retired: set[int] = set()  # numbers to remove once no request uses them
        self._removals: set[asyncio.Task[None]] = set()  # asyncio itself keeps only weak references to tasks

    async def add(self, adapter: Adapter) -> None:
        """Add an adapter, or replace the one of the same name. Raises RequestError if vLLM cannot use it.

        The weights are loaded now even if the adapter is not to be preloaded: an adapter that fails to load in the
        middle of a step would end vLLM's engine core, and with it every request.
        """
        await asyncio.to_thread(self._check, adapter.directory)  # vLLM ignores layers that the model lacks
        number = next(self._numbers)
        # vLLM finds cached prefixes by the adapter's name: under the same name a replacement would get stale KV cache.
        name = adapter.name if adapter.name not in self._by_name else f"{adapter.name}#{number}"
        loaded = library.LoRARequest(name, number, adapter.directory)
        try:
            await self._driver.add_lora(loaded)
            if adapter.pin:
                await self._driver.pin_lora(number)
            elif not adapter.preload:
                await self._driver.remove_lora(number)
        except _ADAPTER_ERRORS as error:
            raise RequestError(f"vLLM cannot use the adapter {adapter.name}: {error_message(error)}") from error
        replaced = self._by_name.get(adapter.name)
        self._by_name[adapter.name] = loaded
        self.registered[adapter.name] = adapter
        await self._retire(replaced)

    async def remove(self, name: str) -> None:
        """Remove an adapter. Nothing happens if there is none of that name."""
        self.registered.pop(name, None)
        await self._retire(self._by_name.pop(name, None))

    @contextmanager
    def using(self, name: str | None) -> Iterator[Any]:
        """Hold the adapter of a request while it runs; None stands for the base model.

        Yields vLLM's LoRARequest, or None. Raises RequestError if there is no adapter of that name.
        """
        if name is None:
            yield None
            return
        adapter = self._by_name.get(name)
        if adapter is None:
            raise RequestError(f"The adapter {excerpt(name)} has not been registered")
        number = adapter.lora_int_id
        self._users[number] += 1
        try:
            yield adapter
        finally:
            self._users[number] -= 1
            if not self._users[number] and number in self._retired:
                self._retired.discard(number)
                # A task of its own: this may run while the request's generator is closed, which should not wait.
                task = asyncio.create_task(self._driver.remove_lora(number))
                self._removals.add(task)
                task.add_done_callback(self._removals.discard)

    async def _retire(self, adapter: Any) -> None:
        """Remove the weights of `adapter` now, or when its last request ends."""
        if adapter is None:
            return
        number = adapter.lora_int_id
        if self._users[number]:
            self._retired.add(number)
        else:
            await self._driver.remove_lora(number)
