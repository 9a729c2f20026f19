"""torch's compiler, `torch._dynamo`, whose code runs when something uses it.

transformers imports it for a few decorators. It takes 0.6 s of a processor, and a model that is not compiled never uses
it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FunctionType, ModuleType
from typing import Any

_PACKAGE = "torch._dynamo"
# transformers.masking_utils imports a class from this module, which needs nothing of the package.
_ALONE = "_trace_wrapped_higher_order_op"


def import_late(package: str = _PACKAGE, alone: str = _ALONE) -> None:
    """Have the code of `package` run at its first use, unless this process has imported it already.

    `alone` is the module of the package that is imported without this code.
    """
    if package not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(package, alone))


class _Finder(MetaPathFinder):
    def __init__(self, package: str, alone: str) -> None:
        self._package = package
        self._alone = f"{package}.{alone}"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self._package:
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is not None and isinstance(spec.loader, SourceFileLoader):
                spec.loader = _LateLoader(fullname, spec.loader.path)
            return spec
        package = sys.modules.get(self._package)
        if isinstance(package, _LateModule) and fullname.startswith(f"{self._package}.") and fullname != self._alone:
            package.load()
            if fullname in sys.modules:  # the code of the package has imported it
                return ModuleSpec(fullname, _Imported())
        return None


class _Imported(Loader):
    """Gives a module that is imported already."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass


class _LateLoader(SourceFileLoader):
    """Makes the package, and leaves its code to the first use of a name that `_LateModule` does not have."""

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _LateModule
        vars(module).update(_execute=super().exec_module, _lock=threading.RLock(), _is_loading=False, _asked=[])


class _LateModule(ModuleType):
    """The package before its code has run: it has the decorators that other modules use when they are imported."""

    _execute: Callable[[ModuleType], None]
    _lock: threading.RLock
    _is_loading: bool
    _asked: list[Callable[[], object]]
    """What is to be called once the code has run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # the machinery of imports asks for others
            raise AttributeError(name)
        self.load()
        return ModuleType.__getattribute__(self, name)

    def load(self) -> None:
        """Run the code of the package, and repeat what was asked of it before. Raises whatever the code raises."""
        with self._lock:
            if self._is_loading or type(self) is ModuleType:
                return  # this call comes from the code itself, or another thread has run it meanwhile
            self._is_loading = True
            try:
                self._execute(self)
            finally:
                self._is_loading = False
            self.__class__ = ModuleType  # type: ignore[assignment]
            for call in self._asked:
                call()

    def allow_in_graph(self, function: Any) -> Any:
        self._asked.append(lambda: self.allow_in_graph(function))
        return function

    def assume_constant_result(self, function: Any) -> Any:
        self._asked.append(lambda: self.assume_constant_result(function))
        return function

    def disable(self, function: Any = None, *arguments: Any, **options: Any) -> Any:
        """Return a function that the compiler does not enter, once there is a compiler."""
        if function is None:
            return lambda decorated: self.disable(decorated, *arguments, **options)
        if not isinstance(function, FunctionType):
            self.load()
            return self.disable(function, *arguments, **options)
        called = [function]

        @functools.wraps(function)
        def call(*values: Any, **more: Any) -> Any:
            return called[0](*values, **more)

        def ask() -> None:
            called[0] = self.disable(function, *arguments, **options)
            vars(call).update(_torchdynamo_disable=True, _torchdynamo_orig_callable=function)

        self._asked.append(ask)
        return call
