"""One worker process: spawned in a session of its own, spoken to over its link, killed with all its children."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmi_server.contract.errors import (
    LmiServerError,
    ModelLoadError,
    ModelMemoryError,
    WorkerDiedError,
    error_from_kind,
)
from lmi_server.contract.link import worker_link
from lmi_server.contract.protocol import (
    Cancel,
    Command,
    Control,
    Error,
    Failed,
    Frames,
    FromWorker,
    Item,
    Load,
    Ready,
    Recall,
    Reply,
    SetLogLevel,
    Shutdown,
    Stats,
    Submit,
)
from lmi_server.machine.mpi import MpiRun
from lmi_server.machine.process_tree import is_stopped, kill_session
from lmi_server.supervisor.job import Job
from lmi_server.supervisor.launch import MpiGroup, SingleProcess, WorkerLaunch
from lmi_server.supervisor.log import WorkerLog

logger = logging.getLogger(__name__)

_EXIT_GRACE_S = 1.0  # from the end of the link to the end of the process
_RECALL_AFTER_S = 0.02
_STOPPED_CHECK_S = 1.0
_STOPPED_CHECKS = 2  # a process that a signal holds is given up after so many checks
_SILENT_CHECKS = 3  # a worker is hung after so many checks without Stats; more than one, so that a pause of ours passes


@dataclass(frozen=True, slots=True)
class MpiLauncher:
    """Starts a worker as `ranks` processes."""

    mpirun: MpiRun
    ranks: int


class WorkerProcess:
    """A worker from its spawning to its end.

    `in_flight` holds the jobs that it has, by id; `on_items` gets what it sends for them; `on_lost` is called once, as
    soon as a worker that was ready is dead. A hung worker (no Stats for `heartbeat_timeout_s`) is killed.
    `environment` is added to that of this process. Where there is an `mpi` launcher, the worker is a group of ranks,
    alive while all of them are. `batch_size` is what its handler takes at once, one such batch after
    the other; None where it serves requests side by side.
    """

    def __init__(
        self,
        name: str,
        on_items: Callable[[WorkerProcess, list[Item]], None],
        on_lost: Callable[[WorkerProcess], None],
        heartbeat_timeout_s: float,
        environment: Mapping[str, str],
        mpi: MpiLauncher | None = None,
    ) -> None:
        self.name = name
        self.in_flight: dict[int, Job] = {}
        self.batch_size: int | None = None
        self.ready_at = 0.0  # time.time()
        self.moved = True  # set by whatever the worker does for a request; whoever watches for progress clears it
        self.used = True  # set by each new request; whoever watches for idleness clears it
        self.quiet_since = self.idle_since = time.monotonic()
        self.gauges: Mapping[str, float] = {}
        self.lost = asyncio.Event()
        self._launch: WorkerLaunch = SingleProcess()
        if mpi is not None:
            self._launch = MpiGroup(mpi.mpirun, mpi.ranks, self._on_message, self._on_rank_lost)
        self._batches: Counter[int] = Counter()  # by their number, the requests of each that are in flight
        self._sent_batches = 0
        self._on_items = on_items
        self._on_lost = on_lost
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._environment = environment
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Ready] = self._loop.create_future()
        self._loaded.add_done_callback(_mark_retrieved)
        self._exited = asyncio.Event()
        self._link = worker_link(self._on_message, self._on_link_lost)
        self._starting: asyncio.Task[Process] | None = None
        self._process: Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._heartbeat: asyncio.TimerHandle | None = None
        self._silent_checks = 0
        self._stopped_checks: Counter[int] = Counter()  # by process
        self._stopped_watch: asyncio.TimerHandle | None = None
        self._retiring = False
        self._control_ids = itertools.count(-1, -1)  # those of requests grow from 1
        self._controls: dict[int, asyncio.Future[LmiServerError | bytes]] = {}
        self._killed = False
        self._oom_kills = 0  # of the whole machine, before the process was there

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def load(self, load: Load, timeout_s: float) -> Ready:
        """Spawn the process and load the model. Raises ModelLoadError; the process is gone then."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._spawn(load)
                ready = await self._loaded
                self.batch_size = ready.batch_size
        except TimeoutError:
            self.kill()
            raise ModelLoadError(
                f"the model was not loaded within model_loading_timeout={timeout_s:g} seconds; raise it, or see the log"
            ) from None
        except OSError as error:
            self.kill()
            raise ModelLoadError(f"the worker process could not be started: {error}") from error
        except BaseException:
            self.kill()
            raise
        self._heartbeat = self._loop.call_later(self._heartbeat_timeout_s / _SILENT_CHECKS, self._check_heartbeat)
        self.ready_at = time.time()
        return ready

    async def control(self, command: Command) -> bytes:
        """Send `command` to the worker and return the answer.

        Raises the error that it answers, or WorkerDiedError.
        """
        if self.lost.is_set():
            raise _died_during(command)
        control_id = next(self._control_ids)
        done: asyncio.Future[LmiServerError | bytes] = self._loop.create_future()
        self._controls[control_id] = done
        self._link.send(Control(control_id, command))
        try:
            outcome = await done
        finally:
            del self._controls[control_id]
        if isinstance(outcome, LmiServerError):
            raise _died_during(command) if isinstance(outcome, WorkerDiedError) else outcome
        return outcome

    def settle(self, item: Item) -> bool:
        """Take the answer to a `control`; return whether it is one."""
        if item.id >= 0:
            return False
        done = self._controls.get(item.id)  # none where nobody waited any longer
        if done is not None and not done.done():
            done.set_result(error_from_kind(item.kind, item.message) if isinstance(item, Error) else _data_of(item))
        return True

    def submit(self, jobs: Sequence[Job]) -> None:
        """Send one batch."""
        self.used = True
        self._sent_batches += 1
        self._batches[self._sent_batches] = len(jobs)
        for job in jobs:
            job.start(self, self._sent_batches)
            self.in_flight[job.id] = job
            self._link.send(Submit(job.id, job.request, more=job is not jobs[-1]))

    def ended(self, job: Job) -> None:
        """Note that `job` is not in flight any more."""
        del self.in_flight[job.id]
        self._batches[job.batch] -= 1
        if not self._batches[job.batch]:
            del self._batches[job.batch]

    def takes_batch(self, now: float) -> bool:
        """Tell whether the worker gets another batch: one at a time, more where its handler is fast."""
        return len(self._batches) <= (self._launch.progress.ahead(now) if self._batches else 0)

    def has_begun(self, job: Job) -> bool:
        """Tell whether the handler has seen `job`; it is asked of a dead worker too."""
        return self.batch_size is None or job.batch <= self._launch.progress.begun

    def recall_delayed(self, now: float) -> bool:
        """Ask for what waits behind a batch that takes long; return False where nothing can wait behind one."""
        if len(self._batches) <= 1:
            return False
        if self._launch.progress.running_s(now) > _RECALL_AFTER_S:
            for job in self.in_flight.values():
                if not self.has_begun(job):
                    self._link.send(Recall(job.id))
        return True

    def cancel(self, job: Job) -> None:
        """Ask the worker to free the place of `job`; it is free once the worker says so."""
        self._link.send(Cancel(job.id))

    def set_log_level(self, level: str) -> None:
        if self._process is not None:  # Load goes first, and tells the level too
            self._link.send(SetLogLevel(level))

    def retire(self, deadline_s: float) -> None:
        """Let the worker finish what it holds within `deadline_s` seconds, and then exit by itself."""
        self._retiring = True
        self._link.send(Shutdown(deadline_s))

    async def shutdown(self, deadline_s: float) -> None:
        """Let the worker finish and exit; kill it when it has not within `deadline_s` seconds."""
        self.retire(deadline_s)
        await self._exit_within(deadline_s)
        self.kill()
        await self.reap()

    def kill(self) -> None:
        """Kill the process and every process that it started."""
        self._killed = True
        if self._process is not None and not self._exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()  # takes no file descriptor, as looking for the others does
            self._kill_session(self._process.pid)

    def _kill_session(self, pid: int) -> None:
        """Kill the worker and what it started; what cannot be found for want of file descriptors, later."""
        try:
            kill_session(pid)
        except OSError as error:
            logger.warning("[%s] cannot look for the processes that it started: %s; trying again", self.name, error)
            self._loop.call_later(_EXIT_GRACE_S, self._kill_session, pid)

    async def reap(self) -> None:
        """Wait for the worker's end and for the last lines of its log; kill it where it does not end by itself."""
        if self._starting is not None:
            await asyncio.wait([self._starting])
        self._stop_watching()
        if self._process is None:
            return
        await self._exit_within(_EXIT_GRACE_S)
        self.kill()
        await self._exited.wait()
        _, open_pipes = await asyncio.wait(self._tasks, timeout=_EXIT_GRACE_S)
        for task in open_pipes:
            task.cancel()
        self._launch.close()

    async def _exit_within(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._exited.wait()

    async def _spawn(self, load: Load) -> None:
        self._oom_kills = _oom_kills()
        self._starting = asyncio.create_task(self._launch.start(self._link, load, self._environment))
        self._starting.add_done_callback(self._on_started)
        await asyncio.shield(self._starting)  # a start that is cancelled leaves a process all the same

    def _on_started(self, starting: asyncio.Task[Process]) -> None:
        if starting.cancelled() or starting.exception() is not None:
            self._link.close()
            return
        self._process = starting.result()
        self._watch(self._process)
        if self._killed:
            self.kill()

    def _watch(self, process: Process) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        log = WorkerLog(self.name, self._launch.rank_of_line)
        self._tasks = [
            asyncio.create_task(self._wait_exit(process)),
            asyncio.create_task(log.forward(process.stdout)),
            asyncio.create_task(log.forward(process.stderr)),
        ]
        self._stopped_watch = self._loop.call_later(_STOPPED_CHECK_S, self._check_stopped)

    async def _wait_exit(self, process: Process) -> None:
        code = await process.wait()
        self._kill_session(process.pid)  # children that the worker left behind
        self._exited.set()
        reason = f"the worker process {_exit_reason(code)} while it loaded the model"
        if code == -signal.SIGKILL and not self._killed and _oom_kills() > self._oom_kills:
            reason += ": the machine or its container ran out of memory"
            self._fail_loading(ModelMemoryError(reason))
        self._fail_loading(ModelLoadError(reason))
        logger.info("[%s] process %d %s", self.name, process.pid, _exit_reason(code))

    def _on_message(self, message: FromWorker) -> None:
        match message:
            case Frames(items):
                self.moved = True
                self._on_items(self, items)
            case Stats(gauges, progressed):
                self.gauges = gauges
                self._silent_checks = 0
                self._note_progress(progressed)
            case Ready():
                if not self._loaded.done():
                    self._loaded.set_result(message)
            case Failed(kind, text):
                cause = error_from_kind(kind, text)
                self._fail_loading(cause if isinstance(cause, ModelLoadError) else ModelLoadError(cause.message))

    def _note_progress(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            job = self.in_flight.get(request_id)
            if job is not None:
                job.reply.progressed = self.moved = True

    def _on_rank_lost(self, rank: int) -> None:
        """End the group with its first rank that ends, unless all of them do."""
        if self._exited.is_set() or self._killed:
            return
        if self._retiring or not self._loaded.done():
            self._loop.call_later(_EXIT_GRACE_S, self.kill)
            return
        logger.error("[%s] rank %d has ended; killing the others", self.name, rank)
        self.kill()

    def _on_link_lost(self) -> None:
        self._stop_watching()
        if not self._loaded.done():
            # The exit code says more than the end of the link, so it gets a moment to arrive.
            self._loop.call_later(_EXIT_GRACE_S, self.kill)
            return
        self.lost.set()
        for done in self._controls.values():
            if not done.done():
                done.set_result(WorkerDiedError(""))
        self._on_lost(self)

    def _fail_loading(self, error: ModelLoadError) -> None:
        if not self._loaded.done():
            self._loaded.set_exception(error)

    def _check_heartbeat(self) -> None:
        self._silent_checks += 1
        if self._silent_checks > _SILENT_CHECKS:
            logger.error("[%s] no sign of life for %g seconds; killing it", self.name, self._heartbeat_timeout_s)
            self.kill()
            return
        self._heartbeat = self._loop.call_later(self._heartbeat_timeout_s / _SILENT_CHECKS, self._check_heartbeat)

    def _check_stopped(self) -> None:
        """Kill a worker one of whose processes is held by a signal: the heartbeat of the others may go on."""
        self._stopped_checks = Counter(
            {pid: self._stopped_checks[pid] + 1 for pid in self._launch.pids if is_stopped(pid)}
        )
        for pid, checks in self._stopped_checks.items():
            if checks >= _STOPPED_CHECKS:
                logger.error("[%s] process %d is stopped by a signal; killing the worker", self.name, pid)
                self._fail_loading(ModelLoadError("the worker process was stopped while it loaded the model"))
                self.kill()
                return
        self._stopped_watch = self._loop.call_later(_STOPPED_CHECK_S, self._check_stopped)

    def _stop_watching(self) -> None:
        for timer in (self._heartbeat, self._stopped_watch):
            if timer is not None:
                timer.cancel()


def _data_of(item: Item) -> bytes:
    return item.data if isinstance(item, Reply) else b""


def _mark_retrieved(loaded: asyncio.Future[Ready]) -> None:
    """Keep asyncio from telling of a failure that nobody waits for any more: the process has ended, as was wanted."""
    if not loaded.cancelled():
        loaded.exception()


def _died_during(command: Command) -> WorkerDiedError:
    return WorkerDiedError(f"The worker process ended during {command.operation}")


def _oom_kills() -> int:
    """Return how many processes the kernel has ended for want of memory since it started; 0 where it does not tell."""
    try:
        counters = Path("/proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in counters.splitlines() if line.startswith("oom_kill ")), 0)


def _exit_reason(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
