"""Lets the modules beside a model.py import each other, also under names that this server has loaded for itself.

Python looks for a module in `sys.modules` first. So this server's package would hide a model's `handlers.py`, and the
library its `msgspec.py`. If a model has such names, its modules get an `__import__` of their own, which finds the
model's module under another name in `sys.modules`. Everything else imports as ever.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

_SERVER = frozenset({"frontend", "handlers", "lmi_server"})  # its packages, loaded or not
_CONTRACT = "djl_python"  # a model's copy of it would lack what LMI's process brings


class UserModules(MetaPathFinder):
    """The modules of one directory of a model, and how they import each other.

    `hidden` has the names that both the directory and this server have.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self.hidden = frozenset(name for name in _names_in(directory) if _is_of_server(name, directory))
        self._mark = (
            "@" + hashlib.sha256(self._directory.encode()).hexdigest()[:8]
        )  # no module of a directory has an "@"
        self._builtins = {**vars(builtins), "__import__": self._import}

    @property
    def builtins(self) -> Mapping[str, Any] | None:
        """What modules of the directory have as `__builtins__`; None if the ordinary ones do."""
        return self._builtins if self.hidden else None

    def import_module(self, name: str) -> ModuleType:
        """Import the module `name` as the modules of the directory do. Raises whatever the module raises."""
        return importlib.import_module(self._own_name(name))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the directory, for Python's import."""
        name = fullname.removesuffix(self._mark)
        if path is not None and not any(Path(entry).is_relative_to(self._directory) for entry in path):
            return None
        found = PathFinder.find_spec(name if path is None else fullname, [self._directory] if path is None else path)
        if found is None:
            return None
        if not isinstance(found.loader, SourceFileLoader):
            return _rename(found, fullname) if name != fullname else None
        found.name = fullname
        found.loader = _UserLoader(fullname, found.loader.path, self._builtins)
        return found

    def _import(self, name: str, *scope: Any, **named: Any) -> Any:
        """Do what `builtins.__import__` does, whose last argument is the level of a relative import."""
        is_relative = named.get("level", scope[3] if len(scope) == 4 else 0) > 0
        return builtins.__import__(name if is_relative else self._own_name(name), *scope, **named)

    def _own_name(self, name: str) -> str:
        first, dot, rest = name.partition(".")
        return f"{first}{self._mark}{dot}{rest}" if first in self.hidden else name


class _UserLoader(SourceFileLoader):
    """Loads a module of a model, which imports by the function `__import__` of its directory."""

    def __init__(self, fullname: str, path: str, names: Mapping[str, Any]) -> None:
        super().__init__(fullname, path)
        self._names = names

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self._names
        super().exec_module(module)


def search(directory: Path) -> UserModules:
    """Have the modules of `directory` found from now on, as modules of a model; return how they import each other."""
    for finder in sys.meta_path:
        if isinstance(finder, UserModules) and finder._directory == str(directory):
            return finder
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    modules = UserModules(directory)
    if modules.hidden:
        sys.meta_path.insert(0, modules)
    return modules


def _names_in(directory: Path) -> set[str]:
    """Return the names of the modules in a directory; without `__init__.py` only if this server has the name, too."""
    files = {path.stem for path in directory.glob("*.py")}
    packages = {path.parent.name for path in directory.glob("*/__init__.py")}
    return files | packages | {name for name in _SERVER if any(directory.glob(f"{name}/*.py"))}


def _is_of_server(name: str, directory: Path) -> bool:
    if name in _SERVER:
        return True
    if name in sys.stdlib_module_names or name == _CONTRACT:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and not Path(file).is_relative_to(directory)


def _rename(found: ModuleSpec, name: str) -> ModuleSpec:
    """Return the spec of a directory without `__init__.py` under another name."""
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = list(found.submodule_search_locations or ())
    return spec
