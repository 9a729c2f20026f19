"""Executes a file of the user's code as a module."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


def execute(path: str | Path, name: str, builtins: Mapping[str, Any] | None = None) -> ModuleType:
    """Execute a Python file as the module `name`, with `builtins` in place of the ordinary ones if they are given.

    Raises whatever the file raises, and then forgets the module.
    """
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    if builtins is not None:
        vars(module)["__builtins__"] = builtins
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
