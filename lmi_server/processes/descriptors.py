"""File descriptors that belong to one process alone."""

from __future__ import annotations

import os
import sys


def keep_from_children(fd: int) -> None:
    """Keep executed programs and forked processes from holding `fd` open.

    A child with a copy of a worker's link would hide the end of the worker from the front end.
    """
    os.set_inheritable(fd, False)
    null = os.open(os.devnull, os.O_RDWR)
    # The number stays in use: the child's copy of a Python object that owns it may close it at any time, and must not
    # hit a newer file of the child.
    os.register_at_fork(after_in_child=lambda: os.dup2(null, fd, inheritable=False))


def send_errors_to_output() -> None:
    """Make standard error the same file as standard output, for this process and all that it starts."""
    sys.stderr.flush()
    os.dup2(1, 2)


def open_standard_files() -> None:
    """Open /dev/null in place of standard input, output and error if this process was started without them.

    Otherwise sockets and pipes would get these numbers, and a worker gets its own standard files under them.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    # Python sets these to None if it finds their files closed.
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
