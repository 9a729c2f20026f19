"""Finds and imports the user's code, and formats its errors with file and line."""

from __future__ import annotations

import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from handlers.user_modules import search
from lmi_server.contract.errors import ModelLoadError, describe, message_of
from lmi_server.contract.texts.quoting import shorten
from lmi_server.files.python_source import execute

DEFAULT_ENTRY_POINT = "model.py"
T = TypeVar("T")


def load_entry_point(entry_point: str | None, model_dir: str) -> ModuleType:
    """Import what option.entryPoint names: a file of the model directory, an absolute path, or a dotted module.

    Raises ModelLoadError with file and line, whatever the module raises.
    """
    name = entry_point or DEFAULT_ENTRY_POINT
    try:
        if name.endswith(".py"):
            return load_file(Path(model_dir, name))  # an absolute name replaces the model directory
        return search(Path(model_dir)).import_module(name)
    except BaseException as error:  # a module may end with sys.exit(), or raise anything else
        raise ModelLoadError(f"{name} cannot be imported: {format_user_error(error, model_dir)}") from error


def load_file(path: Path) -> ModuleType:
    """Execute a Python file as a module, once. It can import what lies beside it.

    The module is named after the file, so that child processes can import it and pickles can refer to it. If another
    module has that name already, the name also has a hash of the path. Raises whatever the file raises.
    """
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    modules = search(path.parent)
    name = path.stem
    if not name.isidentifier() or name in sys.modules:
        name = f"{name}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    return execute(path, name, modules.builtins)


def find_class(module: ModuleType, bases: tuple[type[T], ...]) -> type[T] | None:
    """Return the first class of `module` itself that derives from one of `bases` and is not abstract."""
    for value in vars(module).values():
        if not inspect.isclass(value) or value.__module__ != module.__name__:
            continue
        if issubclass(value, bases) and not inspect.isabstract(value):
            return value
    return None


def find_marked(module: ModuleType, marks: Sequence[str]) -> Mapping[str, Callable[..., Any]]:
    """Return the functions that decorators of djl_python have marked, by mark; of several, the first in the file."""
    functions = [value for value in reversed(vars(module).values()) if inspect.isfunction(value)]
    return {mark: function for mark in marks for function in functions if getattr(function, f"is_{mark}", False)}


def format_user_error(error: BaseException, model_dir: str) -> str:
    """Return "file:line: Class: message" with the innermost line in `model_dir`, if there is one.

    The file is relative to `model_dir`. A long message is shortened.
    """
    if isinstance(error, SyntaxError) and isinstance(error.filename, str):
        where = f"{_inside(error.filename, model_dir)}:{message_of(error.lineno)}"
        return shorten(f"{where}: {type(error).__name__}: {message_of(error.msg)}")
    what = shorten(describe(error))
    place = place_of(error, model_dir)
    return f"{place}: {what}" if place else what


def place_of(error: BaseException, model_dir: str) -> str:
    """Return "file:line" of the innermost frame in the model directory, relative to it; "" if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(model_dir)]
    return f"{_inside(frames[-1].filename, model_dir)}:{frames[-1].lineno}" if frames else ""


def _inside(filename: str, model_dir: str) -> str:
    """Return a path as seen from the model directory: clients read it, whom the rest does not concern."""
    return filename.removeprefix(model_dir).lstrip("/") if filename.startswith(model_dir) else filename
