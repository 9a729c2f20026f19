"""Loads a model.py as a module, for code that tests or wraps another handler."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from djl_python.inputs import Input
from lmi_server.files.python_source import execute


class ModelService:
    """A module with handler functions, and the directory of its model."""

    def __init__(self, module: ModuleType, model_dir: str) -> None:
        self.module = module
        self.model_dir = model_dir

    def invoke_handler(self, function_name: str, inputs: Input) -> Any:
        """Call a function of the module; it finds the directory of the model in the property `model_dir`."""
        inputs.properties["model_dir"] = self.model_dir
        return getattr(self.module, function_name)(inputs)

    async def invoke_handler_async(self, function_name: str, inputs: Input) -> Any:
        """Call an asynchronous function of the module."""
        return await self.invoke_handler(function_name, inputs)


def load_model_service(model_dir: str, entry_point: str, device_id: Any, namespace: str | None = None) -> ModelService:
    """Import an entry point: a file of `model_dir`, an absolute path, or the name of a module.

    `namespace` is part of the name of the module, so that files of the same name do not replace each other. Raises
    ValueError if there is no such file.
    """
    if not entry_point.endswith(".py"):
        return ModelService(importlib.import_module(entry_point), model_dir)
    path = os.path.join(model_dir, entry_point)  # an absolute entry point replaces the directory
    if not os.path.exists(path):
        raise ValueError(f"entry-point file not found {path}.")
    return ModelService(execute(path, _name(path, namespace)), model_dir)


def has_function_in_module(module: ModuleType, function_name: str) -> bool:
    return callable(getattr(module, function_name, None))


def is_valid_dir(dir_path: str) -> bool:
    """Return whether the parent of a path exists."""
    return os.path.exists(os.path.dirname(dir_path))


def find_decorated_function(module: ModuleType, decorator_attribute: str) -> Callable[..., Any] | None:
    """Return the first function, by name, that a decorator has marked with an attribute."""
    values = [getattr(module, name) for name in dir(module)]
    return next((value for value in values if callable(value) and getattr(value, decorator_attribute, False)), None)


def get_annotated_function(
    model_dir: str, decorator_attribute: str, namespace: str | None = None
) -> Callable[..., Any] | None:
    """Return the marked function of the model.py in `model_dir`; None if there is none, or no model.py."""
    if not os.path.exists(os.path.join(model_dir, "model.py")):
        return None
    service = load_model_service(model_dir, "model.py", -1, namespace)
    return find_decorated_function(service.module, decorator_attribute)


def _name(path: str, namespace: str | None) -> str:
    if namespace:
        return "ns_" + re.sub(r"[-.]", "_", namespace)
    return f"model_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
