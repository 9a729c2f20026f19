"""Triton's interpreter with less bookkeeping: the same operations of numpy, in less than half of the time.

The bookkeeping is that of a compiler: each value of a kernel gets new objects for its type and its shape.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"
# Triton has no types.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from triton.language import core
from triton.runtime import interpreter

_prepare_and_call = interpreter.InterpretedFunction.__call__
_prepared: set[Callable[..., Any]] = set()
_name_of_type = interpreter._get_np_dtype
_make_block_type = core.block_type.__init__


def install() -> None:
    """Replace what costs most. The interpreter must not have run yet."""
    builder = interpreter.interpreter_builder
    # It would compute each sum and product of integers again in 64 bits, for assertions that it then leaves out.
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter.InterpretedFunction.__call__ = _call
    interpreter._get_np_dtype = _numpy_type
    core.block_type.__init__ = _init_block_type
    core.tensor.__init__ = _init_tensor


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a device function; replace the operations of its `triton.language` at the first call alone.

    The interpreter does so at each call. What the first call replaces stays, but for what each kernel replaces itself.
    """
    if function.fn in _prepared:
        return function.rewrite()(*args, **kwargs)
    _prepared.add(function.fn)
    return _prepare_and_call(function, *args, **kwargs)


def _numpy_type(kind: Any) -> Any:
    """Return the type of numpy for one of Triton; the interpreter makes a table of all of them for each answer."""
    element = kind.scalar
    return _numpy_type_of(core.uint64 if element.is_ptr() else element)


_numpy_type_of = functools.cache(_name_of_type)


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Make the type of a block from the parts that all blocks of its shape share."""
    lengths = tuple(core._unwrap_if_constexpr(length) for length in core._unwrap_if_constexpr(shape))
    self.element_ty = element_ty
    self.shape, self.numel, text = _parts(lengths)
    self.name = f"<{text}, {element_ty}>"


@functools.cache
def _parts(lengths: tuple[int, ...]) -> tuple[Any, int, str]:
    example = core.block_type.__new__(core.block_type)
    _make_block_type(example, core.int32, list(lengths))
    return example.shape, example.numel, str(example.shape)


def _init_tensor(self: Any, handle: Any, kind: Any) -> None:
    """Make a value, whose shape is an object that all values of the shape share."""
    self.handle = handle
    self.type = kind
    self.dtype = kind.scalar
    self.shape, self.numel = _constants(tuple(kind.shape.values) if kind.is_block() else ())


@functools.cache
def _constants(lengths: tuple[int, ...]) -> tuple[Any, Any]:
    numel = 1
    for length in lengths:
        numel *= length
    return core.tuple([core.constexpr(length) for length in lengths]), core.constexpr(numel)
