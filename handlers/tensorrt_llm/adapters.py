"""The LoRA adapters of a model under TensorRT-LLM, by the names that requests use."""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from handlers.tensorrt_llm import library
from handlers.tensorrt_llm.options import TensorRtLlmOptions
from lmi_server.contract.errors import HandlerError, RequestError
from lmi_server.contract.protocol import Adapter
from lmi_server.contract.texts.quoting import excerpt

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


class Adapters:
    """Adapters of a loaded engine, which keeps their weights and drops them if it needs the room for others.

    The engine identifies an adapter by a number, and reads its weights when a request names the number first. A
    replaced adapter gets a new number, and running requests keep the weights that they began with.
    """

    def __init__(self, options: TensorRtLlmOptions, first_request: Callable[[library.LoRARequest], Awaitable[None]]):
        """`first_request` has the engine generate one token with an adapter, and raises RequestError if it cannot."""
        self._options = options
        self._first_request = first_request
        self._numbers = itertools.count(1)
        self.registered: dict[str, Adapter] = {}
        self._by_name: dict[str, library.LoRARequest] = {}  # those of `registered`, as TensorRT-LLM knows them

    async def add(self, adapter: Adapter) -> None:
        """Add an adapter, or replace the one of the same name. Raises RequestError if the engine cannot use it."""
        if not self._options.enable_lora:
            raise RequestError("the model serves no LoRA adapters; set option.enable_lora=true")
        if adapter.pin:
            raise RequestError("TensorRT-LLM cannot pin an adapter in memory; register it without pin")
        _check(adapter, self._options.max_lora_rank)
        try:
            named = library.LoRARequest(adapter.name, next(self._numbers), adapter.directory)
        except ValueError as error:
            raise RequestError(f"TensorRT-LLM cannot use the adapter {adapter.name}: {error}") from error
        if adapter.preload:
            try:
                await self._first_request(named)
            except (RequestError, HandlerError) as error:
                raise RequestError(f"TensorRT-LLM cannot use the adapter {adapter.name}: {error.message}") from error
        self._by_name[adapter.name] = named
        self.registered[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Remove an adapter. Nothing happens if there is none of that name."""
        self.registered.pop(name, None)
        self._by_name.pop(name, None)

    def find(self, name: str | None) -> library.LoRARequest | None:
        """Return an adapter as TensorRT-LLM knows it; None for the base model. Raises RequestError if it is unknown."""
        if name is None:
            return None
        found = self._by_name.get(name)
        if found is None:
            raise RequestError(f"The adapter {excerpt(name)} has not been registered")
        return found


def _check(adapter: Adapter, max_rank: int) -> None:
    """Raise RequestError for a directory that holds no adapter of peft, or one of a higher rank than the engine takes.

    The engine would find out in the middle of a step.
    """
    directory = Path(adapter.directory)
    try:
        config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(
            f"the adapter {adapter.name} has no adapter_config.json that can be read: {error}"
        ) from error
    if not any((directory / name).is_file() for name in _WEIGHTS):
        raise RequestError(f"the adapter {adapter.name} has no weights ({' or '.join(_WEIGHTS)})")
    rank = config.get("r")
    if isinstance(rank, int) and rank > max_rank:
        raise RequestError(
            f"the adapter {adapter.name} has rank {rank}, and the engine takes {max_rank};"
            f" set option.max_lora_rank={rank}"
        )
