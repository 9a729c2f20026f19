"""File descriptors that belong to one process alone."""

from __future__ import annotations

import os


def keep_from_children(fd: int) -> None:
    """Keep programs that this process executes, and processes that it forks, from holding `fd` open.

    A child with a copy of a worker's link would hide the end of the worker from the front end.
    """
    os.set_inheritable(fd, False)
    null = os.open(os.devnull, os.O_RDWR)
    # The number stays in use: the child's copy of a Python object that owns it may close it at any time, and must not
    # hit a file that the child has opened.
    os.register_at_fork(after_in_child=lambda: os.dup2(null, fd, inheritable=False))
