"""Names by which the machine code of one kernel calls another.

numba would compile the kernel that is called once more, as a part of its caller. The names that numba gives to
functions have a number that differs from process to process. Ours have none: code from disk finds the kernel that this
process has loaded, or compiled anew.
"""

# mypy: disable-error-code="no-untyped-call"
# numba has no types.

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite.binding
from numba import types

_NUMBER = re.compile(r"B\d+v\d+")  # of a function, as numba's mangling has it

_kernels: dict[str, Any] = {}


def register(kernel: Any) -> None:
    """Let other kernels call this one, a dispatcher of numba, by a name. It is known by its qualified name."""
    _kernels[kernel.py_func.__qualname__] = kernel


class Entry(NamedTuple):
    """What is called of a kernel: numba's name of its function, our name of it, and what makes this known to LLVM.

    `load` can be pickled.
    """

    function: str
    symbol: str
    load: Callable[[], None]


def entry_of(library: Any) -> Entry:
    """Return what is called of a kernel, given its library."""
    kernel = _kernels[library.name]
    ((arguments, compiled),) = (each for each in kernel.overloads.items() if each[1].library is library)
    load = functools.partial(_load, kernel.py_func.__module__, library.name, arguments)
    return Entry(compiled.fndesc.llvm_func_name, _symbol(compiled), load)


def _symbol(compiled: Any) -> str:
    return f"lmi_{_NUMBER.sub('', compiled.fndesc.llvm_func_name, count=1)}"


def _load(module: str, name: str, arguments: tuple[Any, ...]) -> None:
    importlib.import_module(module)
    compiled = _kernels[name].get_compile_result(types.void(*arguments))
    address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    llvmlite.binding.add_symbol(_symbol(compiled), address)
