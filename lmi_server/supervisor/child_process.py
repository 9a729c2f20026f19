"""The operating system's side of a worker: its process is spawned, its output logged, its whole family killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence

from lmi_server.contract.link import WorkerLink
from lmi_server.contract.metrics import MetricSink
from lmi_server.contract.protocol import Load
from lmi_server.contract.texts.log_fields import WorkerLogger
from lmi_server.machine.memory import oom_kills
from lmi_server.processes.tree import WORKER_VARIABLE, kill_family
from lmi_server.supervisor.launch.worker_launch import WorkerLaunch
from lmi_server.supervisor.log import WorkerLog

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 1.0  # from the end of the link to the end of the process
_numbers = itertools.count(1)


class ChildProcess:
    """One process (mpirun, if the worker is a group of ranks) and everything that it starts.

    `on_exit` gets how the process ended, in words, and whether the kernel killed it because memory ran out. `on_metric`
    gets the metrics that it prints.
    """

    def __init__(
        self, name: str, launch: WorkerLaunch, on_exit: Callable[[str, bool], None], on_metric: MetricSink
    ) -> None:
        self.killed = False
        self.exited = asyncio.Event()
        self._name = name
        self._mark = f"{os.getpid()}-{next(_numbers)}"
        self._launch = launch
        self._on_exit = on_exit
        self._starting: asyncio.Task[Process] | None = None
        self._process: Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._log = WorkerLog(name, launch.rank_of_line, on_metric)
        self._oom_kills = 0  # before the process was there

    @property
    def last_lines(self) -> Sequence[str]:
        """Return the last lines that it wrote."""
        return list(self._log.last_lines)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def spawn(self, link: WorkerLink, load: Load, environment: Mapping[str, str]) -> None:
        """Start the process and connect `link`. Raises OSError; `link` is closed then."""
        self._oom_kills = oom_kills()
        self._starting = asyncio.create_task(
            self._launch.start(link, load, {**environment, WORKER_VARIABLE: self._mark})
        )
        self._starting.add_done_callback(lambda starting: self._on_started(starting, link))
        # Without the shield, a cancellation could hit between fork and the return of the process: the child that
        # exists already would be unknown. `reap` waits for the start instead, however early the stop comes.
        await asyncio.shield(self._starting)

    def _on_started(self, starting: asyncio.Task[Process], link: WorkerLink) -> None:
        if starting.cancelled() or starting.exception() is not None:
            link.close()
            return
        self._process = starting.result()
        self._watch(self._process)
        if self.killed:
            self.kill()

    def _watch(self, process: Process) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._tasks = [
            asyncio.create_task(self._wait_exit(process)),
            asyncio.create_task(self._log.forward(process.stdout)),
            asyncio.create_task(self._log.forward(process.stderr)),
        ]

    async def _wait_exit(self, process: Process) -> None:
        code = await process.wait()
        self._kill_family(process.pid)  # children that the worker left behind
        self.exited.set()
        # The kernel does not say whom its OOM killer ended. A SIGKILL from outside, while the counter of OOM kills has
        # grown since the start, is the best evidence for a process without privileges.
        out_of_memory = code == -signal.SIGKILL and not self.killed and oom_kills() > self._oom_kills
        reason = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        self._on_exit(reason, out_of_memory)
        WorkerLogger(logger, self._name).info("process %d %s", process.pid, reason)

    def link_lost(self) -> None:
        """Do nothing: the end of the process follows that of its link, and says more."""

    def kill(self) -> None:
        """Kill the process and every process that it started."""
        self.killed = True
        if self._process is not None and not self.exited.is_set():
            # First the process itself, by its handle: looking for the others takes file descriptors, and there may be
            # none left.
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._kill_family(self._process.pid)

    def _kill_family(self, pid: int) -> None:
        """Kill the worker and what it started; try again later if a lack of file descriptors prevents it now."""
        try:
            kill_family(pid, self._mark)
        except OSError as error:
            about = WorkerLogger(logger, self._name)
            about.warning("cannot look for the processes that it started: %s; trying again", error)
            asyncio.get_running_loop().call_later(EXIT_GRACE_S, self._kill_family, pid)

    async def exit_within(self, limit_s: float) -> None:
        """Wait for the end of the process, for at most `limit_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.exited.wait()

    async def wait_started(self) -> None:
        """Wait until the process is there, or cannot be started."""
        if self._starting is not None:
            await asyncio.wait([self._starting])

    async def reap(self) -> None:
        """Wait for the end of the process and the last lines of its log; kill it if it does not end by itself."""
        if self._process is None:
            return
        await self.exit_within(EXIT_GRACE_S)
        self.kill()
        await self.exited.wait()
        # An escaped process may hold the pipes open for ever: their end is not waited for.
        _, open_pipes = await asyncio.wait(self._tasks, timeout=EXIT_GRACE_S)
        for task in open_pipes:
            task.cancel()
        self._launch.close()
