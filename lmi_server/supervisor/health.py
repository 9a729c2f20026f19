"""Whether a worker still lives although its process exists: it reports in time, and no signal holds it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from lmi_server.contract.texts.log_fields import WorkerLogger
from lmi_server.processes.tree import is_stopped
from lmi_server.supervisor.launch.worker_launch import WorkerLaunch

logger = logging.getLogger(__name__)

_STOPPED_CHECK_S = 1.0
_STOPPED_CHECKS = 2  # a process that a signal holds counts as dead after this many checks
_SILENT_CHECKS = 3  # so many checks without a heartbeat; more than one, so that a pause of this process does no harm


class HealthChecks:
    """Calls `on_hung` with the reason, once, when a worker hangs: the worker is as dead as one that has ended.

    Two checks complement each other. The heartbeat covers a worker whose event loop does not run. It says nothing of a
    worker that is being loaded, nor of ranks other than 0, and it is slow; the state of each process covers these.
    """

    def __init__(
        self, name: str, launch: WorkerLaunch, heartbeat_timeout_s: float, on_hung: Callable[[str], None]
    ) -> None:
        self._name = name
        self._launch = launch
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._on_hung = on_hung
        self._loop = asyncio.get_running_loop()
        self._silent_checks = 0
        self._stopped_checks: Counter[int] = Counter()  # by process
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._stopped_timer: asyncio.TimerHandle | None = None

    def watch_processes(self) -> None:
        """Look once a second for a process that a signal (SIGSTOP) holds."""
        self._stopped_timer = self._loop.call_later(_STOPPED_CHECK_S, self._check_stopped)

    def watch_heartbeat(self) -> None:
        """Expect `beat` to be called at least every `heartbeat_timeout_s` seconds from now on."""
        self._heartbeat_timer = self._loop.call_later(self._heartbeat_timeout_s / _SILENT_CHECKS, self._check_heartbeat)

    def beat(self) -> None:
        self._silent_checks = 0

    def stop(self) -> None:
        for timer in (self._heartbeat_timer, self._stopped_timer):
            if timer is not None:
                timer.cancel()

    def _check_heartbeat(self) -> None:
        # Checks are counted instead of comparing times: if this process itself was suspended, the heartbeats of the
        # worker wait in the socket, and a comparison of times would kill a worker that is alive.
        self._silent_checks += 1
        if self._silent_checks > _SILENT_CHECKS:
            WorkerLogger(logger, self._name).error(
                "no sign of life for %g seconds; killing it", self._heartbeat_timeout_s
            )
            self._on_hung("the worker process hung")
            return
        self.watch_heartbeat()

    def _check_stopped(self) -> None:
        self._stopped_checks = Counter(
            {pid: self._stopped_checks[pid] + 1 for pid in self._launch.pids if is_stopped(pid)}
        )
        for pid, checks in self._stopped_checks.items():
            if checks >= _STOPPED_CHECKS:
                WorkerLogger(logger, self._name).error("process %d is stopped by a signal; killing the worker", pid)
                self._on_hung("the worker process was stopped")
                return
        self.watch_processes()
