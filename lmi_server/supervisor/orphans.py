"""Processes whose parents have ended: this process adopts them, so that they can be found and do not pile up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os

from lmi_server.processes.parents import adopt_orphans
from lmi_server.processes.tree import adopted_zombies, kill_descendants

logger = logging.getLogger(__name__)

_CHECK_S = 1.0


class Orphans:
    """Adopts the orphans below this process, and collects ended ones, from `start` to `end`.

    A process that has ended keeps its number until its parent has asked for its exit code. asyncio asks at once for
    the processes that it has started. So a process that is still there at the next check was adopted.
    """

    def __init__(self) -> None:
        self._ended: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        adopt_orphans()
        self._check()

    def end(self) -> None:
        """Kill every process below this one: the server ends, and its workers have ended."""
        if self._timer is not None:
            self._timer.cancel()
        kill_left()

    def _check(self) -> None:
        found = _zombies()
        for pid in found & self._ended:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = found
        self._timer = asyncio.get_running_loop().call_later(_CHECK_S, self._check)


def kill_left() -> None:
    """Kill every process below this one. It may run in any thread."""
    try:
        kill_descendants()
    except OSError as error:
        logger.warning("cannot look for processes that the workers have left behind: %s", error)


def _zombies() -> set[int]:
    with contextlib.suppress(OSError):  # no file descriptor is free; the next check may find one
        return adopted_zombies()
    return set()
