"""A plugin of pytest with which the kernels for the tile registers of AMX run on a processor that lacks these.

Kernels are compiled as for an Intel Xeon of the generation Sapphire Rapids. An instruction for tile registers then
raises SIGILL, whose handler computes what the processor would, and ends the process where the processor refuses. All
other instructions are the processor's own, so it needs AVX-512 with VNNI and bfloat16.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# numba infers the types of what it compiles.

from __future__ import annotations

import ctypes
import signal
from typing import Any

import llvmlite.binding
import numpy as np
from numba import cfunc, njit, types
from numba.extending import intrinsic

from lmi_server.machine import tile_registers

_OF_AMD = ("sse4a", "clzero", "shstk")
_real_features = llvmlite.binding.get_host_cpu_features


def _features() -> Any:
    features = _real_features()
    features.update(dict.fromkeys(("amx-tile", "amx-bf16", "amx-int8"), True) | dict.fromkeys(_OF_AMD, False))
    return features


# Before kernels are imported: they choose by these.
llvmlite.binding.get_host_cpu_features = _features
llvmlite.binding.get_host_cpu_name = lambda: "sapphirerapids"
tile_registers.ask_for_tile_registers = lambda: True

from handlers.cpu_kernels.intrinsics import load  # noqa: E402
from handlers.cpu_kernels.threads.atomics import add  # noqa: E402

_THREADS, _TILES, _ROWS, _BYTES = 64, 8, 16, 64
# Of each thread: its id, whether its tiles are configured, then the rows and the bytes of a row of each tile.
_ID, _IS_CONFIGURED, _ROWS_AT, _BYTES_AT, _WORDS = 0, 1, 2, 10, 18
_WORDS_OF_ROW = _BYTES // 4
_states, _tiles = np.zeros((_THREADS, _WORDS), np.int64), np.zeros((_THREADS, _TILES, _ROWS, _BYTES), np.uint8)
_counts = np.zeros(2, np.int64)
"""How many threads have used tiles, and how many products were computed."""
_STATES, _TILES_AT, _COUNTS = (int(array.ctypes.data) for array in (_states, _tiles, _counts))

# Where the kernel of Linux has registers, by their numbers in an instruction, in what the handler of a signal is given.
_REGISTERS_AT, _RIP = 40, 16
_ORDER = np.array([13, 14, 12, 11, 15, 10, 9, 8, *range(8)])

_libc = ctypes.CDLL(None)
_pthread_self, _abort = _libc.pthread_self, _libc.abort
_pthread_self.restype, _pthread_self.argtypes = ctypes.c_size_t, []
_abort.restype, _abort.argtypes = None, []


@intrinsic
def _at(context, address, kind):
    """Return the elements of a type at an address."""
    pointer = types.CPointer(kind.instance_type)

    def build(ctx, builder, sig, args):
        return builder.inttoptr(args[0], ctx.get_value_type(pointer))

    return pointer(types.uintp, kind), build


@njit
def _state_at(place):
    return _at(np.uintp(_STATES + 8 * _WORDS * place), np.int64)


@njit
def _state_of(thread):
    """Return the place of a thread's state."""
    used = min(_at(np.uintp(_COUNTS), np.int64)[0], _THREADS)
    for place in range(used):
        if _state_at(place)[_ID] == thread:
            return place
    place = add(np.uintp(_COUNTS), 1)
    if place >= _THREADS:
        _abort()
    _state_at(place)[_ID] = thread
    return place


@njit
def _clear(place, state):
    for word in range(_IS_CONFIGURED, _WORDS):
        state[word] = 0
    for tile in range(_TILES):
        _zero(_tile(place, tile))


@njit
def _zero(tile):
    held = _at(np.uintp(tile), np.int64)
    for word in range(_ROWS * _BYTES // 8):
        held[word] = 0


@njit
def _tile(place, tile):
    """Return the address of a tile."""
    return _TILES_AT + _ROWS * _BYTES * (_TILES * place + tile)


@njit
def _configure(place, state, settings):
    _clear(place, state)
    if settings[0] != 1:
        _abort()
    for byte in range(64):
        is_used = byte == 0 or 16 <= byte < 32 or 48 <= byte < 56
        if settings[byte] != 0 and not is_used:
            _abort()
    for tile in range(_TILES):
        rows, count = np.int64(settings[48 + tile]), settings[16 + 2 * tile] + 256 * np.int64(settings[17 + 2 * tile])
        if rows > _ROWS or count > _BYTES or (rows == 0) != (count == 0):
            _abort()
        state[_ROWS_AT + tile], state[_BYTES_AT + tile] = rows, count
    state[_IS_CONFIGURED] = 1


@njit
def _copy(place, state, tile, address, stride, is_store):
    """Copy the rows of a tile to an address, or from there; what it lacks of 16 rows of 64 bytes is zero."""
    if not is_store:
        _zero(_tile(place, tile))
    for row in range(state[_ROWS_AT + tile]):
        held = _at(np.uintp(_tile(place, tile) + row * _BYTES), np.uint8)
        line = _at(np.uintp(address + row * stride), np.uint8)
        for byte in range(state[_BYTES_AT + tile]):
            if is_store:
                line[byte] = held[byte]
            else:
                held[byte] = line[byte]


@njit
def _sizes(state, total, left, right):
    """Return the rows, the columns and the words of each sum of a product of tiles, which fit each other."""
    rows, inner, columns = state[_ROWS_AT + total], state[_ROWS_AT + right], state[_BYTES_AT + total] // 4
    if total in (left, right) or left == right or rows != state[_ROWS_AT + left] or inner == 0:
        _abort()
    if state[_BYTES_AT + left] != 4 * inner or state[_BYTES_AT + right] != 4 * columns:
        _abort()
    if state[_BYTES_AT + total] != 4 * columns:
        _abort()
    return rows, columns, inner


@njit
def _multiply(place, state, total, left, right):
    """Add the product of two tiles of bfloat16 to a third one: the sums of even and of odd inputs, one after other."""
    rows, columns, inner = _sizes(state, total, left, right)
    sums, width = _at(np.uintp(_tile(place, total)), np.float32), 2 * _WORDS_OF_ROW
    lefts, rights = _at(np.uintp(_tile(place, left)), np.uint16), _at(np.uintp(_tile(place, right)), np.uint16)
    for row in range(rows):
        for column in range(columns):
            even = odd = np.float32(0)
            for word in range(inner):
                one, other = width * row + 2 * word, width * word + 2 * column
                even += load(lefts[one]) * load(rights[other])
                odd += load(lefts[one + 1]) * load(rights[other + 1])
            sums[_WORDS_OF_ROW * row + column] += even + odd
    add(np.uintp(_COUNTS + 8), 1)


@njit
def _byte(byte, has_sign):
    return np.int32(byte) - 256 * (byte >> 7) if has_sign else np.int32(byte)


@njit
def _multiply_bytes(place, state, total, left, right, kind):
    """Add the product of two tiles of bytes to a third one. The kind of prefix says which have a sign."""
    rows, columns, inner = _sizes(state, total, left, right)
    sums, width = _at(np.uintp(_tile(place, total)), np.int32), 4 * _WORDS_OF_ROW
    lefts, rights = _at(np.uintp(_tile(place, left)), np.uint8), _at(np.uintp(_tile(place, right)), np.uint8)
    for row in range(rows):
        for column in range(columns):
            found = np.int64(sums[_WORDS_OF_ROW * row + column])
            for byte in range(4 * inner):
                one = _byte(lefts[width * row + byte], kind >= 2)
                other = _byte(rights[width * (byte // 4) + 4 * column + byte % 4], kind % 2 == 1)
                found += one * other
            sums[_WORDS_OF_ROW * row + column] = np.int32(found)  # which wraps around, as the processor's sums do
    add(np.uintp(_COUNTS + 8), 1)


@njit
def _address(code, registers, after, rex_x, rex_b):
    """Return the address that the operand behind an opcode names, the bytes from row to row, and where it ends."""
    mod, rm = code[4] >> 6, code[4] & 7
    place, index, base = 5, np.int64(0), np.int64(0)
    has_base = rm != 5 or mod != 0
    if rm == 4:
        scale, number, rm = code[5] >> 6, (code[5] >> 3 & 7) + 8 * rex_x, code[5] & 7
        place, has_base = 6, rm != 5 or mod != 0
        index = registers[_ORDER[number]] << scale if number != 4 else np.int64(0)
    if has_base:
        base = registers[_ORDER[rm + 8 * rex_b]]
    elif place == 5:
        base = np.int64(after + 9)  # relative to the next instruction
    if mod == 1:
        base += np.int64(code[place]) - 256 * (code[place] >> 7)
        place += 1
    elif mod == 2 or not has_base:
        base += _at(np.uintp(after + place), np.int32)[0]
        place += 4
    return base, index, place


@njit
def _compute(registers):
    """Compute the instruction that comes next if it is for tile registers; return whether it was."""
    begin = registers[_RIP]
    code = _at(np.uintp(begin), np.uint8)
    prefix, opcode, kind = code[2] & 0x87, code[3], code[2] & 3
    # A prefix VEX of three bytes, for the second map of opcodes, without W and with the short vector length.
    if code[0] != 0xC4 or code[1] & 31 != 2 or prefix != kind or opcode not in (0x49, 0x4B, 0x5C, 0x5E):
        return False
    rex_x, rex_b = 1 - (code[1] >> 6 & 1), 1 - (code[1] >> 5 & 1)
    tile, other, of_registers = code[4] >> 3 & 7, code[4] & 7, code[4] >> 6 == 3
    place = _state_of(np.int64(_pthread_self()))
    state = _state_at(place)
    is_setting = opcode == 0x49 and kind == 0
    if not is_setting and (not state[_IS_CONFIGURED] or state[_ROWS_AT + tile] == 0):
        return False
    end = 5
    if of_registers and is_setting and code[4] == 0xC0:
        _clear(place, state)  # tilerelease
    elif of_registers and opcode == 0x49 and kind == 3:
        _zero(_tile(place, tile))  # tilezero
    elif of_registers and opcode == 0x5C and kind == 2:
        _multiply(place, state, tile, other, 7 - (code[2] >> 3 & 7))  # tdpbf16ps
    elif of_registers and opcode == 0x5E:
        # tdpbuud, tdpbusd, tdpbsud, tdpbssd
        _multiply_bytes(place, state, tile, other, 7 - (code[2] >> 3 & 7), kind)
    elif not of_registers and is_setting and tile == 0:
        address, index, end = _address(code, registers, begin, rex_x, rex_b)
        _configure(place, state, _at(np.uintp(address + index), np.uint8))  # ldtilecfg
    elif not of_registers and opcode == 0x4B and kind in (2, 3) and other == 4:
        address, stride, end = _address(code, registers, begin, rex_x, rex_b)
        _copy(place, state, tile, address, stride, kind == 2)  # tilestored, tileloadd
    else:
        return False
    registers[_RIP] = begin + end
    return True


@cfunc("void(int32, intp, intp)")
def _handler(number, information, context):
    registers = _at(np.uintp(context + _REGISTERS_AT), np.int64)
    if not _compute(registers):
        _abort()
    while _compute(registers):  # those that follow at once
        pass


class _Action(ctypes.Structure):
    """`struct sigaction` of the GNU C library."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_SIGINFO, _NODEFER = 4, 0x40000000


def pytest_sessionstart() -> None:
    """Handle the signal, behind pytest, which does so as well."""
    action = _Action(handler=_handler.address, flags=_SIGINFO | _NODEFER)
    assert _libc.sigaction(signal.SIGILL, ctypes.byref(action), None) == 0


def pytest_sessionfinish() -> None:
    """Raise an error, which pytest reports by its exit code, if nothing was computed in tiles."""
    assert _counts[1] > 0, "no test has used tile registers"
