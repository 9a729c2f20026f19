"""Looks after a handler's code from outside: tells where it hangs, and ends a process that takes too much memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TOLD_AT = 0.8  # of predict_timeout: soon after, the process is killed


def resident_bytes() -> int:
    """Return the memory that this process has."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE


class Watch:
    """`look` is called once a second.

    `running_s` tells for how long the handler has been at its batch, `stack` where; `give_up` ends the process with a
    reason. `memory_limit_mb` of 0 is no limit.
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
        self._told = False

    def look(self) -> None:
        running_s = self._running_s()
        if running_s < _TOLD_AT * self._predict_timeout_s:
            self._told = False
        elif not self._told:
            self._told = True
            logger.error("model %s: the handler runs for %.0f seconds:\n%s", self._model_name, running_s, self._stack())
        limit = self._memory_limit_mb
        if limit and (resident := resident_bytes()) > limit * _MIB:
            taken = f"the process has {resident // _MIB} MiB of memory, more than max_worker_memory_mb={limit}"
            self._give_up(f"{taken}; it was at:\n{self._stack()}" if running_s else taken)
