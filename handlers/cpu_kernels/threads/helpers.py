"""The helper threads of the kernels (see parallel.py), and whether there are any."""

from __future__ import annotations

import atexit
import os
import threading

from handlers.cpu_kernels.threads.atomics import MACHINE_IS_KNOWN
from handlers.cpu_kernels.threads.parallel import STATE, STOP, THREADS, help_compute, wake_helpers

MAX_THREADS = 16
"""All threads take pieces of work from one counter; of more threads each would wait for the others there."""

_END_LIMIT_S = 1.0
_helpers: list[threading.Thread] = []


def start(threads: int) -> bool:
    """Start helpers, so that `threads` threads can compute, the calling one and helpers; return whether there are any.

    There are none for one thread, for more than MAX_THREADS, or on a processor whose instructions are not known here:
    then the kernels run in numba's threads. Helpers sleep until `use`.
    """
    if not 1 < threads <= MAX_THREADS or not MACHINE_IS_KNOWN:
        return False
    while len(_helpers) < threads - 1:
        number = len(_helpers)
        helper = threading.Thread(target=help_compute, args=(number,), name=f"kernels-{number}", daemon=True)
        _helpers.append(helper)
        helper.start()
    return True


def threads() -> int:
    """Return how many threads compute with all helpers, the calling one included."""
    return len(_helpers) + 1


def use(on: bool) -> None:
    """Let the helpers compute the kernels from now on, or numba's threads. It changes no result."""
    STATE[THREADS] = threads() if on and _helpers else 0


def are_used() -> bool:
    return bool(STATE[THREADS])


def stop() -> None:
    """End the helpers; kernels run in numba's threads again. One that runs meanwhile is computed to its end."""
    if not _helpers:
        return
    STATE[THREADS], STATE[STOP] = 0, 1
    wake_helpers()
    for helper in _helpers:
        helper.join(_END_LIMIT_S)
    _helpers.clear()
    STATE[STOP] = 0


def _forget() -> None:
    """A forked process has no threads but one."""
    _helpers.clear()
    STATE[:] = 0


# The code that helpers run is gone once the interpreter has ended.
atexit.register(stop)
os.register_at_fork(after_in_child=_forget)
