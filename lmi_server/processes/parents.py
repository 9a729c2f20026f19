"""What a process asks Linux about its parent's end, and about the ends of the parents below it."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that happens (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_group_with_parent() -> None:
    """As `end_with_parent`, for the leader of a process group that its parent may stop: the others are to end as well.

    At the parent's end the kernel sends SIGHUP to a group that is stopped. A server started by nohup ignores that
    signal, and everything that it starts would.
    """
    end_with_parent()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends (Linux only).

    Otherwise the first process of the machine would, and nothing would tell which server a daemon belongs to.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
