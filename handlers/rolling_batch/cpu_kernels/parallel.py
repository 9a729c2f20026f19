"""Runs a function in numba's threads.

numba has a loop for that, prange. It rewrites the whole function around the loop, which takes most of the time that
such a kernel takes to compile. Here the loop's body is a function of its own, and numba's threads call it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.ufunc import parallel

_INT, _BYTES = ir.IntType(64), ir.IntType(8).as_pointer()


def _load_threads():
    """Make the functions of numba's threads known to LLVM, which compiled code calls by their names."""
    parallel._launch_threads()


@intrinsic
def in_threads(context, function, count, arguments):
    """Call `function(first, last, *arguments)` in each thread, for runs of numbers that make up `range(count)`.

    The function is one that numba compiles and that returns nothing. `arguments` is a tuple.
    """
    _load_threads()
    call = function.get_call_type(context, (types.intp, types.intp, *arguments.types), {})

    def build(ctx, builder, sig, args):
        library = ctx.active_code_library
        compiled = function.dispatcher.get_compile_result(call)
        library.add_linking_library(compiled.library)
        library._reload_init.add(_load_threads)  # numba runs it before it loads this code from disk
        count = args[1]
        values = cgutils.unpack_tuple(builder, args[2])
        threads = builder.call(_external(builder, "get_num_threads", ir.FunctionType(_INT, [])), [])
        shares = builder.select(builder.icmp_signed("<", count, threads), count, threads)
        data = cgutils.pack_struct(builder, [count, shares, *values])
        shared = cgutils.alloca_once_value(builder, data)
        # The arguments of a generalized ufunc with one array: arrays, their numbers of elements, their steps. The array
        # begins at address 0 and has elements of one byte, so that the address of an element is its number.
        arrays, sizes, steps = (cgutils.alloca_once(builder, kind) for kind in (_BYTES, _INT, _INT))
        builder.store(ir.Constant(_BYTES, None), arrays)
        builder.store(shares, sizes)
        builder.store(ir.Constant(_INT, 1), steps)
        share = _share(ctx, builder.module, compiled.fndesc, data.type)
        kind = ir.FunctionType(ir.VoidType(), [_BYTES] * 5 + [_INT] * 3)
        pointers = [builder.bitcast(pointer, _BYTES) for pointer in (share, arrays, sizes, steps, shared)]
        one_array = [ir.Constant(_INT, 0), ir.Constant(_INT, 1)]
        builder.call(_external(builder, "numba_parallel_for", kind), [*pointers, *one_array, threads])
        return ctx.get_dummy_value()

    return types.void(function, types.intp, arguments), build


def _external(builder, name, kind):
    return cgutils.get_or_insert_function(builder.module, kind, name)


def _share(ctx, module, described, kind):
    """Return the function that a thread calls, as the inner loop of a ufunc: it computes the thread's share."""
    pointer = _INT.as_pointer()
    of_loop = ir.FunctionType(ir.VoidType(), [_BYTES.as_pointer(), pointer, pointer, _BYTES])
    function = ir.Function(module, of_loop, module.get_unique_name("share"))
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    arrays, sizes, _, data = function.args
    begin = builder.ptrtoint(builder.load(arrays), _INT)
    end = builder.add(begin, builder.load(sizes))
    count, shares, *values = cgutils.unpack_tuple(builder, builder.load(builder.bitcast(data, kind.as_pointer())))
    first, last = (builder.sdiv(builder.mul(count, place), shares) for place in (begin, end))
    callee = ctx.declare_function(module, described)
    ctx.call_conv.call_function(builder, callee, described.restype, described.argtypes, [first, last, *values])
    builder.ret_void()
    return function
