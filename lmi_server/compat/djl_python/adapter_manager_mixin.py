"""A base class for handlers that keep LoRA adapters: it reads LMI's calls and answers them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

from djl_python.inputs import Input
from djl_python.outputs import Output

_NO_ROOM = ("No free lora slots", "greater than the number of GPU LoRA slots")  # what vLLM says


class AdapterManagerMixin(ABC):
    """Subclasses load, remove and pin the weights. `adapter_registry` has the call that registered each adapter."""

    def __init__(self) -> None:
        self.adapter_registry: dict[str, Input] = {}

    @abstractmethod
    async def add_lora(self, lora_name: str, lora_alias: str, lora_path: str) -> Any:
        """Load the weights of an adapter."""

    @abstractmethod
    async def remove_lora(self, lora_name: str, lora_alias: str) -> Any:
        """Remove the weights of an adapter."""

    @abstractmethod
    async def pin_lora(self, lora_name: str, lora_alias: str) -> Any:
        """Keep the weights of an adapter in memory."""

    async def register_adapter(self, inputs: Input) -> Output:
        """Register an adapter: properties `name`, `alias`, `src`; contents `preload` (true) and `pin` (false)."""
        name, alias, path = _description(inputs)
        inputs.properties["has_custom_code"] = has_code(path)
        loaded = False
        try:
            _check_path(path)
            _check(inputs)
            if _flag(inputs, "preload", True):
                loaded = bool(await self.add_lora(name, alias, path))
            if _flag(inputs, "pin", False):
                await self.pin_lora(name, alias)
        except Exception as error:  # noqa: BLE001 - the border to the engine that a subclass drives
            if loaded:
                await self.remove_lora(name, alias)
            return _refusal(error)
        self.adapter_registry[name] = inputs
        return _success(f"Adapter {alias} registered")

    async def update_adapter(self, inputs: Input) -> Output:
        """Load, unload or pin a registered adapter, as `preload` and `pin` say. Its `src` cannot change.

        Raises ValueError if it is not registered.
        """
        name, alias, path = _description(inputs)
        if name not in self.adapter_registry:
            raise ValueError(f"Adapter {alias} not registered.")
        before = self.adapter_registry[name]
        try:
            _check(inputs)
            if path != before.get_property("src"):
                raise NotImplementedError("Updating adapter path is not supported.")
            if _flag(before, "pin", False) and not _flag(inputs, "pin", False):
                raise ValueError("Unpin adapter is not supported.")
            if _flag(inputs, "preload", True) and not _flag(before, "preload", True):
                await self.add_lora(name, alias, path)
            if not _flag(inputs, "preload", True) and _flag(before, "preload", True):
                await self.remove_lora(name, alias)
            if _flag(inputs, "pin", False) and not _flag(before, "pin", False):
                await self.pin_lora(name, alias)
        except Exception as error:  # noqa: BLE001 - the border to the engine that a subclass drives
            return _refusal(error)
        self.adapter_registry[name] = inputs
        return _success(f"Adapter {alias} updated")

    async def unregister_adapter(self, inputs: Input) -> Output:
        """Unregister an adapter. Raises ValueError if it is not registered."""
        name, alias, _ = _description(inputs)
        if name not in self.adapter_registry:
            raise ValueError(f"Adapter {alias} not registered.")
        try:
            await self.remove_lora(name, alias)
        except Exception as error:  # noqa: BLE001 - the border to the engine that a subclass drives
            return _refusal(error)
        del self.adapter_registry[name]
        return _success(f"Adapter {alias} unregistered")


def _description(inputs: Input) -> tuple[str, str, str]:
    name = inputs.get_property("name")
    return name, inputs.get_property("alias") or name, inputs.get_property("src") or ""


def _flag(inputs: Input, key: str, default: bool) -> bool:
    return bool(inputs.get_as_string(key).lower() == "true") if inputs.contains_key(key) else default


def has_code(path: str) -> str:
    """Return "true" if an adapter has its own model.py, otherwise "false". Not part of LMI's interface."""
    return "true" if os.path.isfile(os.path.join(path, "model.py")) else "false"


def _check_path(path: str) -> None:
    if not os.path.exists(path):
        raise ValueError(f"Only local LoRA models are supported. {path} is not a valid path")


def _check(inputs: Input) -> None:
    if _flag(inputs, "pin", False) and not _flag(inputs, "preload", True):
        raise ValueError("Can not set preload to false and pin to true")


def _refusal(error: Exception) -> Output:
    """Return the answer to a call that failed. Raises MemoryError if there is no room for the adapter."""
    if any(text in str(error) for text in _NO_ROOM):
        raise MemoryError(str(error)) from error
    answer = {"data": "", "last": True, "code": 424, "error": str(error)}
    return Output().add(Output.binary_encode(answer), key="data")


def _success(text: str) -> Output:
    return Output().add(Output.binary_encode({"data": text}), key="data")
