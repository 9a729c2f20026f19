"""What threads need to share work, and numba's language lacks: atomic words of memory, and waiting for one to change.

An address is that of an int64 that other threads read and write as well. All operations are sequentially consistent.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_INT, _INT32, _VOID = ir.IntType(64), ir.IntType(32), ir.VoidType()
_ORDER = "seq_cst"
_MACHINE = platform.machine()
# The number of the system call futex, and LLVM's name of the instruction for loops that wait, with its arguments.
_FUTEX = {"x86_64": 202, "aarch64": 98}
_PAUSE = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}
_WAIT, _WAKE = 128, 129  # FUTEX_WAIT and FUTEX_WAKE, both among the threads of one process (FUTEX_PRIVATE_FLAG)

MACHINE_IS_KNOWN = _MACHINE in _FUTEX
"""Whether threads can wait here for each other: the functions below compile on any machine, but do not sleep there."""


def _word(builder, address):
    return builder.inttoptr(address, _INT.as_pointer())


@intrinsic
def read(context, address):
    """Return the word at an address."""
    return types.int64(types.uintp), lambda ctx, builder, sig, args: builder.load_atomic(
        _word(builder, args[0]), _ORDER, 8
    )


@intrinsic
def write(context, address, value):
    """Write the word at an address."""

    def build(ctx, builder, sig, args):
        builder.store_atomic(args[1], _word(builder, args[0]), _ORDER, 8)
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.int64), build


@intrinsic
def add(context, address, value):
    """Add to the word at an address; return what it was before."""
    return types.int64(types.uintp, types.int64), lambda ctx, builder, sig, args: builder.atomic_rmw(
        "add", _word(builder, args[0]), args[1], _ORDER
    )


@intrinsic
def replace(context, address, expected, value):
    """Write the word at an address if it is the expected one; return whether it was."""

    def build(ctx, builder, sig, args):
        found = builder.cmpxchg(_word(builder, args[0]), args[1], args[2], _ORDER, _ORDER)
        return builder.extract_value(found, 1)

    return types.boolean(types.uintp, types.int64, types.int64), build


@intrinsic
def pause(context):
    """Tell the processor that this thread waits in a loop."""

    def build(ctx, builder, sig, args):
        if MACHINE_IS_KNOWN:
            name, numbers = _PAUSE[_MACHINE]
            kind = ir.FunctionType(_VOID, [_INT32] * len(numbers))
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), list(map(_INT32, numbers)))
        return ctx.get_dummy_value()

    return types.void(), build


@intrinsic
def give_way(context):
    """Let other threads run on this core, if any wants to."""

    def build(ctx, builder, sig, args):
        kind = ir.FunctionType(_INT32, [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return ctx.get_dummy_value()

    return types.void(), build


@intrinsic
def sleep_while(context, address, upper_half):
    """Sleep until another thread calls `wake`, while the upper 32 bits of the word at an address are these.

    It returns at once if they are not, and may return without a reason.
    """

    def build(ctx, builder, sig, args):
        _futex(builder, args[0], _WAIT, args[1])
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.int64), build


@intrinsic
def wake(context, address):
    """Wake all threads that sleep in `sleep_while` at an address."""

    def build(ctx, builder, sig, args):
        _futex(builder, args[0], _WAKE, _INT(2**31 - 1))
        return ctx.get_dummy_value()

    return types.void(types.uintp), build


def _futex(builder, address, operation, value):
    """Call it for the upper half of a word, whose bytes come last: the machines named above are little-endian."""
    if not MACHINE_IS_KNOWN:
        return
    kind = ir.FunctionType(_INT, [_INT], var_arg=True)
    call = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    upper = builder.add(address, _INT(4))
    builder.call(call, [_INT(_FUTEX[_MACHINE]), upper, _INT(operation), value, _INT(0)])
