"""Watches a handler's code from another thread: logs where it hangs, ends a process that takes too much memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LOGGED_AT = 0.8  # of predict_timeout; at 1.0 the front end kills the process, and nobody could tell where it was


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE


def excess(limit_mb: int) -> str | None:
    """Return how far this process is above `limit_mb` (0: no limit) MiB, in words; None if it is not."""
    if not limit_mb or (resident := resident_bytes()) <= limit_mb * _MIB:
        return None
    return f"the process takes {resident // _MIB} MiB, more than max_worker_memory_mb={limit_mb}; raise the limit"


class Watch:
    """Looks at the handler's thread, once a second, when the link's thread calls `look`.

    `running_s` returns the seconds since the running batch began (0.0: none), `stack` returns where the handler's
    thread is, `give_up` ends the process with a reason. A `memory_limit_mb` of 0 is no limit.
    """

    def __init__(
        self,
        model_name: str,
        predict_timeout_s: float,
        memory_limit_mb: int,
        running_s: Callable[[], float],
        stack: Callable[[], str],
        give_up: Callable[[str], None],
    ) -> None:
        self._model_name = model_name
        self._predict_timeout_s = predict_timeout_s
        self._memory_limit_mb = memory_limit_mb
        self._running_s = running_s
        self._stack = stack
        self._give_up = give_up
        self._logged = False

    def look(self) -> None:
        running_s = self._running_s()
        if running_s < _LOGGED_AT * self._predict_timeout_s:
            self._logged = False
        elif not self._logged:
            self._logged = True
            hangs = "model %s: the handler has not returned for %.0f s; it is at:\n%s"
            logger.error(hangs, self._model_name, running_s, self._stack())
        taken = excess(self._memory_limit_mb)
        if taken is not None:
            self._give_up(f"{taken}\nThe handler was at:\n{self._stack()}" if running_s else taken)
