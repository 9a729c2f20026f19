"""Python source: parsed, for what is to be known of it without running it, or executed as a module."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

# Python 3.11 counts the depth of all parsers of a process together: if the collector of garbage lets another thread
# run in the middle of one, `ast.parse` raises a SystemError (CPython's "AST constructor recursion depth mismatch").
_ONE_AT_A_TIME = threading.Lock()


def parse(source: str | bytes) -> ast.Module:
    """Return the syntax tree of a module, in any thread. Raises SyntaxError or ValueError."""
    with _ONE_AT_A_TIME:
        return ast.parse(source)


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
