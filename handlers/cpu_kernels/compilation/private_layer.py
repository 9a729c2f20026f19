"""What the kernels take of numba's private layer to compile less and to keep what is compiled.

Kernels are the same without it, and take longer to compile: so a numba that has changed it does without. What else they
take (numba.core.cgutils, an intrinsic's context) has no other form: the model does not load, and the error names it.
"""

# mypy: disable-error-code="no-untyped-call"
# numba has no types.

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import llvmlite.binding
import numba
from numba import njit

from handlers.cpu_kernels.compilation.kernel_symbols import register

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

TESTED = ((0, 63), (0, 68))
"""The first and the last version that the tests ran with; setup.cfg asks for this range."""


class Pipelines(NamedTuple):
    """The options that have numba compile kernels, and their parts, in this project's way; none: in its own."""

    of_kernels: Mapping[str, Any]
    of_parts: Mapping[str, Any]
    of_separate_parts: Mapping[str, Any]


def pipelines() -> Pipelines:
    """Return how kernels are compiled: by part_compiler.py, if that works with the installed numba."""

    def compilers() -> Pipelines:
        from handlers.cpu_kernels.compilation.part_compiler import KernelCompiler, PartCompiler, SeparatePartCompiler

        found = Pipelines(*({"pipeline_class": each} for each in (KernelCompiler, PartCompiler, SeparatePartCompiler)))
        if not _is_tested(numba.version_info.short):
            _try(found)
        return found

    return _if_possible(compilers, lambda: Pipelines({}, {}, {}), "the parts of kernels are compiled several times")


def find_place(package: Path) -> bool:
    """Return whether what is compiled of the modules below `package` is kept."""

    def find() -> bool:
        from handlers.cpu_kernels.compilation import kernel_cache

        return kernel_cache.find_place(package)

    return _if_possible(find, lambda: False, "each start compiles its kernels anew")


def keep(kernel: Any) -> None:
    """Have the compiled code of a kernel kept, if `find_place` has found a place."""
    from handlers.cpu_kernels.compilation import kernel_cache

    kernel_cache.keep(kernel)


def target() -> tuple[str, str, str]:
    """Return what numba compiles for: the kind of machine, and the name and the features of its processor."""

    def ask() -> tuple[str, str, str]:
        from numba.core import registry

        kind, name, features = registry.cpu_target.target_context.codegen().magic_tuple()
        return kind, name, features

    def ask_llvm() -> tuple[str, str, str]:
        host = llvmlite.binding
        return host.get_process_triple(), host.get_host_cpu_name(), host.get_host_cpu_features().flatten()

    return _if_possible(ask, ask_llvm, "NUMBA_CPU_NAME is not seen")


def _is_tested(version: tuple[int, ...]) -> bool:
    return TESTED[0] <= version[:2] <= TESTED[1]


def _try(found: Pipelines) -> None:
    """Compile a kernel with a part, and one that calls it. Raises whatever numba does, or AssertionError."""

    @njit(no_cpython_wrapper=True, **found.of_parts)  # type: ignore[untyped-decorator]
    def part(number: int) -> int:
        return number + 1

    @njit(no_cpython_wrapper=True, **found.of_separate_parts)  # type: ignore[untyped-decorator]
    def doubled(number: int) -> int:
        return number * 2

    @njit(**found.of_kernels)  # type: ignore[untyped-decorator]
    def whole(number: int) -> int:
        return doubled(part(number))  # type: ignore[no-any-return]

    register(whole)

    @njit(**found.of_kernels)  # type: ignore[untyped-decorator]
    def caller(number: int) -> int:
        return whole(number) + part(number)  # type: ignore[no-any-return]

    assert (whole(20), caller(20)) == (42, 63), "a kernel computes something else"


def _if_possible(ask: Callable[[], _T], instead: Callable[[], _T], effect: str) -> _T:
    try:
        return ask()
    # The border to numba's private classes: nothing says what they raise.
    except Exception as error:  # noqa: BLE001
        logger.warning(
            "numba %s is not as the versions that were tested (%s to %s): %s: %s; %s",
            numba.__version__,
            *(".".join(map(str, version)) for version in TESTED),
            type(error).__name__,
            error,
            effect,
        )
        return instead()
