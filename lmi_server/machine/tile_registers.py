"""The tile registers of AMX; Linux gives them only to programs that ask."""

from __future__ import annotations

import ctypes
import platform

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def ask_for_tile_registers() -> bool:
    """Ask Linux for the use of the tile registers in this process, by all of its threads; return the answer.

    Each program has to ask before the first use (Linux 5.16 or later: "Using XSTATE features in user space
    applications" in the kernel's documentation, ARCH_REQ_XCOMP_PERM). oneDNN asks when it first uses them. vLLM's
    attention on the CPU does not, and if nothing has asked before, the process dies of an illegal instruction. So this
    is a plugin of vLLM (`vllm.general_plugins` in setup.cfg), which it calls in each of its processes.
    """
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    try:
        return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)
    except (OSError, AttributeError):
        return False
