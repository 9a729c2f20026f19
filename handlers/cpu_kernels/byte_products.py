"""One instruction adds four products of bytes to each lane of a vector: AVX-512 VNNI, Arm's dot product and i8mm.

LLVM's list of an Arm processor's features lacks these, so that the kernel of the system is asked. They are written as
assembly, because LLVM ends the process at an instruction that it does not take for one of its target.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

import ctypes
import platform
from typing import Literal

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import cgutils

from handlers.cpu_kernels.intrinsics import LANES, host_has

_HWCAP, _HWCAP2 = 16, 26
_DOT_PRODUCT, _I8MM = 20, 13  # bits in these words of Linux


def _arm_has(word: int, bit: int) -> bool:
    if platform.machine() != "aarch64" or numba.config.CPU_NAME is not None:
        return False
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return bool(getauxval(word) >> bit & 1)


HAS_VNNI = host_has("avx512vnni") and host_has("avx512bw")
HAS_DOT_PRODUCT = _arm_has(_HWCAP, _DOT_PRODUCT)
HAS_I8MM = HAS_DOT_PRODUCT and _arm_has(_HWCAP2, _I8MM)
"""Whether Arm's instructions multiply bytes with a sign by bytes without one."""
if HAS_DOT_PRODUCT:
    llvmlite.binding.initialize_native_asmparser()  # numba itself writes no assembly
CHOSEN = "vnni" if HAS_VNNI else "i8mm" if HAS_I8MM else "dotprod" if HAS_DOT_PRODUCT else "no byte products"

Signed = Literal["both", "neither", "second"]
_ON_ARM = {"both": ("dotprod", "sdot"), "neither": ("dotprod", "udot"), "second": ("i8mm", "usdot")}
_PART = 4  # words of a vector of Arm's NEON


def add_byte_products(builder, total, first, second, signed: Signed):
    """Return `total`, LANES words, with the products of the bytes in two others. `signed` says which have a sign.

    AVX-512 takes the first without a sign and the second with one: it is right for "both" if the first is not negative,
    and for "neither" if the second is below 128.
    """
    if HAS_VNNI:
        kind = ir.FunctionType(total.type, [total.type] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        return builder.call(function, [total, first, second])
    extension, instruction = _ON_ARM[signed]
    parts = [
        _on_arm(builder, extension, instruction, [_part(builder, vector, begin) for vector in (total, first, second)])
        for begin in range(0, LANES, _PART)
    ]
    while len(parts) > 1:
        parts = [_joined(builder, *pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _on_arm(builder, extension: str, instruction: str, operands):
    total, of_bytes = operands[0], ir.VectorType(ir.IntType(8), 4 * _PART)
    kind = ir.FunctionType(total.type, [total.type, of_bytes, of_bytes])
    text = f".arch_extension {extension}\n{instruction} $0.4s, $2.16b, $3.16b"
    factors = [builder.bitcast(vector, of_bytes) for vector in operands[1:]]
    return builder.asm(kind, text, "=w,0,w,w", [total, *factors], False)


def _part(builder, vector, begin: int):
    return builder.shuffle_vector(vector, vector, _order(range(begin, begin + _PART)))


def _joined(builder, one, other):
    return builder.shuffle_vector(one, other, _order(range(2 * one.type.count)))


def _order(places: range):
    return ir.Constant(ir.VectorType(ir.IntType(32), len(places)), list(places))
