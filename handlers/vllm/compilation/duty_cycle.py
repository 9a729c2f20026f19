"""Lets a background process run while no requests run, and for a bounded share of the time while they do.

The lowest priority is not enough: on two cores a compiler of priority 19 takes two thirds of the tokens per second. The
threads of the engine meet after each operation and sleep until the last of them has come. The compiler runs in these
moments, keeps a core for its next time slice, and shares caches and memory with the engine. So the compiler is stopped
(SIGSTOP) while requests run. It still gets a tenth of that time, to end under a load that never pauses.

A stopped process must not outlive its worker. The process that leads the group asks the kernel for SIGKILL at its
parent's end (`end_group_with_parent`), which a stopped process gets too. The others of its group get SIGHUP and SIGCONT
from the kernel (POSIX: a stopped group without a parent outside).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from threading import Event

_LOOK_S = 0.01  # how often it is decided
_GRACE_S = 0.5  # a client that sends one request after another leaves gaps that are shorter
_CYCLE_S = 0.5
_SHARE = 0.1  # of each cycle, that the background process may run while requests do


class DutyCycle:
    """Decides when the background process runs: always without requests, else for a share of each cycle."""

    def __init__(self) -> None:
        self._since: float | None = None  # when the requests began that run, or have just ended
        self._latest = 0.0  # when requests were last seen

    def may_run(self, now: float, busy: bool) -> bool:
        """Return whether the background process may run at `now` (seconds), where requests run if `busy`."""
        if busy:
            self._latest = now
            if self._since is None:
                self._since = now
        if self._since is None or now - self._latest > _GRACE_S:
            self._since = None
            return True
        return (now - self._since) % _CYCLE_S >= (1 - _SHARE) * _CYCLE_S  # at the end of each cycle


def wait_while_pausing(process: subprocess.Popen[bytes], is_busy: Callable[[], bool], ended: Event) -> int:
    """Wait for a process that leads a process group; stop the group whenever it may not run.

    Returns the exit code. Once `ended` is set, the group is killed. No other thread may wait for the process: its
    number could belong to another process then.
    """
    cycle, runs = DutyCycle(), True
    while process.poll() is None:
        may_run = cycle.may_run(time.monotonic(), is_busy())
        if may_run != runs:
            os.killpg(process.pid, signal.SIGCONT if may_run else signal.SIGSTOP)
            runs = may_run
        if ended.wait(_LOOK_S):
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()
    return process.returncode
