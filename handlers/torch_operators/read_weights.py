"""Which layers a module does not call, because it reads their weights itself."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Iterator

from torch import nn

_ABOUT = ("dtype", "device")  # what a weight is, and not its numbers


@functools.cache
def read_weights(kind: type[nn.Module], numbers: bool = False) -> frozenset[str]:
    """Return the layers below a module whose weight it reads itself (the index of DeepSeek V3.2 does).

    Its methods say so, inherited ones as well; what its constructor reads is read before weights are laid out.
    `numbers`: without the layers whose weights it only asks for their type or device.
    """
    own = itertools.takewhile(lambda base: base is not nn.Module, kind.__mro__)
    named = itertools.chain.from_iterable(vars(base).items() for base in own)
    methods = (inspect.unwrap(method) for name, method in named if inspect.isfunction(method) and name != "__init__")
    reads = itertools.chain.from_iterable(_weights_of_self(method.__code__) for method in methods)
    return frozenset(layer for layer, asked in reads if not (numbers and asked in _ABOUT))


def _weights_of_self(code: types.CodeType) -> Iterator[tuple[str, object]]:
    """Yield NAME of each `self.NAME.weight` and the operand that follows, in the functions within as well."""
    values = [instruction.argval for instruction in _without_training(code)]
    # From Python 3.13 on one instruction loads two variables; what follows is of the second one.
    operands = [value[-1] if isinstance(value, tuple) and value else value for value in values]
    following = itertools.chain(operands[3:], [None])
    for owner, layer, attribute, asked in zip(operands, operands[1:], operands[2:], following, strict=False):
        if (owner, attribute) == ("self", "weight"):
            yield layer, asked
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _weights_of_self(inner)


def _without_training(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yield instructions, but not those of `if self.training` (Mamba's layers read weights there)."""
    end, is_asked = 0, False
    for instruction in dis.get_instructions(code):
        if instruction.offset < end:
            continue
        if is_asked and "IF_FALSE" in instruction.opname:
            end = instruction.argval
        is_asked = instruction.argval == "training" or (is_asked and instruction.opname == "TO_BOOL")
        yield instruction
