"""Runs a part of a kernel in several threads: helpers of this module, or numba's.

A step has hundreds of such regions. With OpenMP, as under numba's threads, a region ends when each thread of the team
has done its share. If another program has one of the cores, the others wait for its thread in region after region: one
busy process beside a model on two cores made its steps six times as long. Helpers take work only when they run. The
thread that begins a region computes all pieces that no helper has taken, so that it waits only for a helper that lost
its core in the middle of a piece. A region without helpers costs no more than a call.

The words that threads share are in `STATE`:

- ticket: the number of the region in its upper 32 bits, then 16 bits each for how many pieces it has, and for how many
  are taken. A thread takes a piece when it adds one with a compare-and-swap. The number of the region makes that fail
  for a thread that read the ticket in an earlier region.
- work and data: the function that computes pieces of this region, and the address of its arguments; count: how many
  numbers its pieces make up. They are not written before all pieces are done, so a thread with a piece may read them.
- done: how many pieces are done.
- sleepers: how many helpers sleep, or are about to. They look for a ticket some microseconds, and then sleep until the
  number of the region changes.
- owned: whether a region is open. A second thread computes its regions alone meanwhile.
- threads: how many compute a region, the one that begins it included; 0 if there are no helpers. Then numba's do it.
- stop: whether the helpers are to end.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.ufunc import parallel

from handlers.cpu_kernels.compilation.decorators import kernel, kernel_part
from handlers.cpu_kernels.threads.atomics import add, give_way, pause, read, replace, sleep_while, wake, write

_INT, _BYTES = ir.IntType(64), ir.IntType(8).as_pointer()
_WORK = ir.FunctionType(ir.VoidType(), [_INT, _INT, _INT])  # address of the arguments, first and last number

# Words of STATE. What different threads write is in different lines of the caches.
_TICKET, _WORK_AT, _DATA_AT, _COUNT, _DONE, _SLEEPERS, _OWNED = 0, 1, 2, 3, 8, 16, 24
THREADS, STOP = 32, 33
_WORDS = 40
STATE = np.zeros(_WORDS + 8, np.int64)
STATE = STATE[-STATE.ctypes.data % 64 // 8 :][:_WORDS]
_SYMBOL = "lmi_kernel_threads"
llvmlite.binding.add_symbol(_SYMBOL, STATE.ctypes.data)  # compiled code finds it by this name, also when it is loaded

# Pieces for each thread: more than one, so that a thread that comes late or loses its core leaves others some of its
# share. With four, steps took 3 % longer on a quiet machine, and were no shorter beside a busy process.
_PIECES = 2
_MAX_PIECES = 2**16 - 1
# How often a helper looks for work before it sleeps (30 to 100 microseconds), and how often who waits for the end of a
# region looks for it before it lets others have its core.
_LOOKS, _LOOKS_AT_END = 2000, 1000


@kernel_part()
def shares_of(threads):
    """Return into how many shares of the same size work is to be divided for a number of threads."""
    return threads if read(_word(THREADS)) == 0 else threads * _PIECES


@intrinsic
def in_threads(context, function, count, arguments):
    """Call `function(first, last, *arguments)` in each thread, for runs of numbers that make up `range(count)`.

    The function is one that numba compiles and that returns nothing. `arguments` is a tuple.

    numba has a loop for that, prange. It rewrites the whole function around the loop, which takes most of the time that
    such a kernel takes to compile. Here the loop's body is a function of its own.
    """
    call = function.get_call_type(context, (types.intp, types.intp, *arguments.types), {})
    region = types.void(types.uintp, types.uintp, types.intp)
    _compute.compile(region)

    def build(ctx, builder, sig, args):
        library = ctx.active_code_library
        compiled, computing = function.dispatcher.get_compile_result(call), _compute.get_compile_result(region)
        link = getattr(library, "link_behind", library.add_linking_library)
        for part in (compiled, computing):
            link(part.library)
        library._reload_init.add(_load_numba_threads)  # numba runs it before it loads this code from disk
        values = zip(arguments.types, cgutils.unpack_tuple(builder, args[2]), strict=True)
        data = cgutils.pack_struct(builder, [_uncounted(ctx, builder, kind, value) for kind, value in values])
        kept = cgutils.alloca_once_value(builder, data)
        work = _work(ctx, builder.module, compiled.fndesc, data.type)
        addresses = [builder.ptrtoint(pointer, _INT) for pointer in (work, kept)]
        _call_compiled(ctx, builder, computing.fndesc, [*addresses, args[1]])
        return ctx.get_dummy_value()

    return types.void(function, types.intp, arguments), build


def _uncounted(ctx, builder, kind, value):
    """Return an argument without the words that count references to its arrays: the caller has them until all is done.

    Each slice of an array counts one, and all threads would write that word. Two threads that unpack blocks took 1.18
    times as long so for 64 rows, on an AMD EPYC.
    """
    if isinstance(kind, types.BaseTuple):
        values = zip(kind.types, cgutils.unpack_tuple(builder, value), strict=True)
        return ctx.make_tuple(builder, kind, [_uncounted(ctx, builder, *each) for each in values])
    if isinstance(kind, types.Array):
        array = ctx.make_array(kind)(ctx, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        return array._getvalue()
    return value


def _work(ctx, module, described, kind):
    """Return the function that computes numbers of a region: it calls the compiled one with the arguments."""
    function = ir.Function(module, _WORK, module.get_unique_name("work"))
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    data, first, last = function.args
    values = cgutils.unpack_tuple(builder, builder.load(builder.inttoptr(data, kind.as_pointer())))
    _call_compiled(ctx, builder, described, [first, last, *values])
    builder.ret_void()
    return function


def _call_compiled(ctx, builder, described, arguments):
    callee = ctx.declare_function(builder.module, described)
    ctx.call_conv.call_function(builder, callee, described.restype, described.argtypes, arguments)


@kernel_part()
def _compute(work, data, count):
    """Compute one region."""
    threads = read(_word(THREADS))
    if threads == 0:
        _in_numba_threads(work, data, count)
        return
    pieces = min(count, threads * _PIECES, _MAX_PIECES)
    if pieces < 2 or not replace(_word(_OWNED), 0, 1):
        _call(work, data, 0, count)
        return
    write(_word(_WORK_AT), np.int64(work))
    write(_word(_DATA_AT), np.int64(data))
    write(_word(_COUNT), count)
    write(_word(_DONE), 0)
    number = ((read(_word(_TICKET)) >> 32) + 1) & 0x7FFFFFFF
    write(_word(_TICKET), number << 32 | pieces << 16)
    if read(_word(_SLEEPERS)) > 0:
        wake(_word(_TICKET))
    _take_pieces()
    looks = 0
    while read(_word(_DONE)) < pieces:
        pause()
        looks += 1
        if looks > _LOOKS_AT_END:
            give_way()
    write(_word(_OWNED), 0)


@kernel_part()
def _take_pieces():
    """Compute pieces of the open region until all are taken."""
    while True:
        ticket = read(_word(_TICKET))
        place, pieces = _places(ticket)
        if place >= pieces:
            return
        if replace(_word(_TICKET), ticket, ticket + 1):
            count = read(_word(_COUNT))
            work, data = np.uintp(read(_word(_WORK_AT))), np.uintp(read(_word(_DATA_AT)))
            _call(work, data, count * place // pieces, count * (place + 1) // pieces)
            add(_word(_DONE), 1)


@kernel_part()
def _places(ticket):
    """Return how many pieces are taken, and how many there are."""
    return ticket & 0xFFFF, (ticket >> 16) & 0xFFFF


@kernel()
def help_compute(number):
    """Compute pieces of regions until STOP is set. `number`: of this helper; those from THREADS - 1 on have a rest."""
    looks = 0
    while read(_word(STOP)) == 0:
        ticket = read(_word(_TICKET))
        place, pieces = _places(ticket)
        if place < pieces and number < read(_word(THREADS)) - 1:
            _take_pieces()
            looks = 0
        elif looks < _LOOKS:
            pause()
            looks += 1
        else:
            # Who opens a region writes the ticket and then reads this count; here it is the other way round. So either
            # that thread sees the count and wakes the helper, or the ticket has changed and the helper does not sleep.
            add(_word(_SLEEPERS), 1)
            sleep_while(_word(_TICKET), ticket >> 32)
            add(_word(_SLEEPERS), -1)
            looks = 0


@kernel()
def wake_helpers():
    """Wake the helpers that sleep, by a region without pieces, once no other region is open."""
    while not replace(_word(_OWNED), 0, 1):
        give_way()
    number = ((read(_word(_TICKET)) >> 32) + 1) & 0x7FFFFFFF
    write(_word(_TICKET), number << 32)
    wake(_word(_TICKET))
    write(_word(_OWNED), 0)


@intrinsic
def _word(context, place):
    """Return the address of a word of STATE."""

    def build(ctx, builder, sig, args):
        state = builder.module.globals.get(_SYMBOL)
        if state is None:
            state = ir.GlobalVariable(builder.module, ir.ArrayType(_INT, _WORDS), _SYMBOL)
        return builder.ptrtoint(builder.gep(state, [_INT(0), args[0]]), _INT)

    return types.uintp(types.intp), build


@intrinsic
def _call(context, work, data, first, last):
    """Call the function at an address."""

    def build(ctx, builder, sig, args):
        builder.call(builder.inttoptr(args[0], _WORK.as_pointer()), args[1:])
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.intp, types.intp), build


# --- numba's threads ---


def _load_numba_threads():
    """Make the functions of numba's threads known to LLVM, which compiled code calls by their names."""
    parallel._launch_threads()


@intrinsic
def _in_numba_threads(context, work, data, count):
    """Compute a region in numba's threads: each of them computes one share of it."""
    _load_numba_threads()

    def build(ctx, builder, sig, args):
        count = args[2]
        threads = builder.call(_external(builder, "get_num_threads", ir.FunctionType(_INT, [])), [])
        parts = builder.select(builder.icmp_signed("<", count, threads), count, threads)
        region = cgutils.alloca_once_value(builder, cgutils.pack_struct(builder, [*args, parts]))
        # The arguments of a generalized ufunc with one array: arrays, their numbers of elements, their steps. The array
        # begins at address 0 and has elements of one byte, so that the address of an element is its number.
        arrays, sizes, steps = (cgutils.alloca_once(builder, kind) for kind in (_BYTES, _INT, _INT))
        builder.store(ir.Constant(_BYTES, None), arrays)
        builder.store(parts, sizes)
        builder.store(_INT(1), steps)
        kind = ir.FunctionType(ir.VoidType(), [_BYTES] * 5 + [_INT] * 3)
        part = _part_of_region(builder.module, builder.load(region).type)
        pointers = [builder.bitcast(pointer, _BYTES) for pointer in (part, arrays, sizes, steps, region)]
        builder.call(_external(builder, "numba_parallel_for", kind), [*pointers, _INT(0), _INT(1), threads])
        return ctx.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.intp), build


def _external(builder, name, kind):
    return cgutils.get_or_insert_function(builder.module, kind, name)


def _part_of_region(module, kind):
    """Return the function that a thread of numba calls, as the inner loop of a ufunc: it computes its share."""
    pointer = _INT.as_pointer()
    of_loop = ir.FunctionType(ir.VoidType(), [_BYTES.as_pointer(), pointer, pointer, _BYTES])
    function = ir.Function(module, of_loop, module.get_unique_name("part"))
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    arrays, sizes, _, region = function.args
    begin = builder.ptrtoint(builder.load(arrays), _INT)
    end = builder.add(begin, builder.load(sizes))
    work, data, count, parts = cgutils.unpack_tuple(builder, builder.load(builder.bitcast(region, kind.as_pointer())))
    first, last = (builder.sdiv(builder.mul(count, place), parts) for place in (begin, end))
    builder.call(builder.inttoptr(work, _WORK.as_pointer()), [data, first, last])
    builder.ret_void()
    return function
