"""The decorators of kernels and of their parts: numba's `njit`. Compiled code is valid until a source here changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numba import njit

from handlers.cpu_kernels import amx, byte_products
from handlers.cpu_kernels.compilation import private_layer
from handlers.cpu_kernels.compilation.kernel_symbols import register


def sources_digest(folder: Path) -> str:
    """Return a digest of all Python files in `folder` and below it."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


_KERNELS = Path(__file__).parent.parent
SOURCES = sources_digest(_KERNELS)
IS_KEPT = private_layer.find_place(_KERNELS)
"""Whether later starts, and other processes, find what is compiled."""


def target() -> tuple[str, str, str]:
    """Return what is compiled for: the kind of machine, and the name of its processor and what is used of it."""
    kind, name, features = private_layer.target()
    chosen = "amx" if amx.IS_USABLE else "vectors"  # not by the processor's features alone, as numba thinks
    return kind, name, f"{features},{chosen},{byte_products.CHOSEN}"


TARGET = hashlib.sha256(" ".join(target()).encode()).hexdigest()[:16]
"""A digest of what is compiled for."""

# C code does not call kernels, and a division by zero raises no error. Code for both takes long to compile.
_COMPACT = {"no_cfunc_wrapper": True, "error_model": "numpy"}
_PIPELINES = private_layer.pipelines()
PART: Mapping[str, Any] = {"no_cpython_wrapper": True, **_PIPELINES.of_parts, **_COMPACT}
"""Options of a part of kernels, for `njit` and for `overload(jit_options=...)`."""


def kernel_part(is_separate: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function that only kernels call, never Python, when a kernel that calls it is compiled.

    Without what Python would need to call it, and without machine code of its own, numba has much less to compile. A
    large one that `is_separate` is not inlined, and so not optimised once more in each function that calls it.
    """
    pipeline = _PIPELINES.of_separate_parts if is_separate else {}
    decorate: Callable[[Callable[..., Any]], Any] = njit(**{**PART, **pipeline}, **options)
    return decorate


def kernel(signature: Any = None, **options: Any) -> Callable[[Callable[..., None]], Callable[..., Any]]:
    """Compile a function with numba when it is first called, or now for a `signature`; run it without the GIL.

    Compiled code is looked up by the function's qualified name. But a kernel contains the functions that it calls:
    after a change of another file, intrinsics.py say, kernels would run that contain its former functions. So the name
    carries a digest of every source file of the kernels. It carries one of the target, too: machines of several kinds
    may share a folder.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., Any]:
        function.__qualname__ = f"{function.__name__}_{SOURCES}_{TARGET}"
        compiled = njit(**_PIPELINES.of_kernels, **_COMPACT, nogil=True, **options)(function)
        if IS_KEPT:
            private_layer.keep(compiled)
        register(compiled)
        if signature is not None:
            compiled.compile(signature)
            compiled.disable_compile()
        return compiled  # type: ignore[no-any-return]

    return decorate
