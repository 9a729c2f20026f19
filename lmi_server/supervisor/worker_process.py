"""One worker, from its spawning to its end.

A worker is put together from parts. Each owns one thing:

    ChildProcess     the process and everything that it starts
    WorkerRequests   the requests in flight
    ControlCalls     the commands about the model itself
    HealthChecks     the checks that it still lives

`WorkerProcess` holds the link, gives each message to its part, and decides the meaning of an end of the link or of the
process.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from lmi_server.contract.errors import (
    LmiServerError,
    ModelLoadError,
    ModelMemoryError,
    WorkerDiedError,
    error_from_kind,
)
from lmi_server.contract.link import worker_link
from lmi_server.contract.metrics import MetricSink, drop_metric
from lmi_server.contract.progress import Progress
from lmi_server.contract.protocol import (
    Failed,
    Frame,
    Frames,
    FromWorker,
    Leaving,
    Load,
    Ready,
    SetLogLevel,
    Shutdown,
    Stats,
)
from lmi_server.contract.texts.log_fields import WorkerLogger
from lmi_server.machine.mpi import MpiRun
from lmi_server.supervisor.child_process import EXIT_GRACE_S, ChildProcess
from lmi_server.supervisor.health import HealthChecks
from lmi_server.supervisor.job import Job
from lmi_server.supervisor.launch.remote import RemoteLaunch, RemotePlace, RemoteProcess
from lmi_server.supervisor.launch.worker_launch import MpiGroup, SingleProcess, WorkerLaunch
from lmi_server.supervisor.worker_requests import ControlCalls, WorkerRequests

logger = logging.getLogger(__name__)
_NAMED_REQUESTS = 20


@dataclass(frozen=True, slots=True)
class MpiLauncher:
    """Starts a worker as `ranks` processes."""

    mpirun: MpiRun
    ranks: int


class WorkerProcess:
    """A worker.

    `on_items` gets what the worker sends for its requests and calls. Both other callbacks are called once if a worker
    that was ready ends: `on_ending` as soon as it can take nothing more, `on_lost` when it is dead. A worker that sends
    no Stats for `heartbeat_timeout_s` seconds is killed. `environment` is added to that of this process. With an `mpi`
    launcher the worker is a group of ranks, which lives while all of them do. `on_metric` gets the metrics that it
    prints. `python` is its interpreter. With a `remote` place the worker runs there, and is connected to. The
    variable `socket_directory` gets a directory of the worker's own. `cause` is the error of the requests that it held
    at its end.
    """

    def __init__(
        self,
        name: str,
        on_items: Callable[[WorkerProcess, list[Frame]], None],
        on_ending: Callable[[WorkerProcess], None],
        on_lost: Callable[[WorkerProcess], None],
        heartbeat_timeout_s: float,
        environment: Mapping[str, str],
        mpi: MpiLauncher | None = None,
        on_metric: MetricSink = drop_metric,
        python: str = sys.executable,
        remote: RemotePlace | None = None,
        socket_directory: str = "",
    ) -> None:
        self.name = name
        self.started_at = 0.0  # time.time(); 0.0 before
        self.ready_at = 0.0  # the same
        self.load_s = 0.0  # from the start of the process until the model was loaded
        self.is_local = remote is None
        self.gauges: Mapping[str, float] = {}  # as the worker last reported them
        self._loading: Progress | None = None
        self.is_ending = False
        self.lost = asyncio.Event()
        self.cause: LmiServerError = WorkerDiedError("The worker process ended while it held the request")
        launch: WorkerLaunch = SingleProcess(python, socket_directory)
        if mpi is not None:
            launch = MpiGroup(python, mpi.mpirun, mpi.ranks, self._on_message, self._on_rank_lost, socket_directory)
        if remote is not None:
            launch = RemoteLaunch(remote)
        self._link = worker_link(self._on_message, self._on_link_lost)
        self.requests = WorkerRequests(self._link, launch)
        self.controls = ControlCalls(self._link)
        self._child: ChildProcess | RemoteProcess = (
            ChildProcess(name, launch, self._on_exit, on_metric)
            if remote is None
            else RemoteProcess(remote, self._on_exit)
        )
        self._health = HealthChecks(name, launch, heartbeat_timeout_s, self._on_hung)
        self._on_items = on_items
        self._on_ending = on_ending
        self._on_lost = on_lost
        self._environment = environment
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Ready] = self._loop.create_future()
        self._loaded.add_done_callback(_mark_retrieved)
        self.is_retiring = False
        self._link_is_lost = False
        self._failure: ModelLoadError | None = None  # what a load fails with for the end of the process
        self._end = "did not end in time"
        self._report: Callable[[], str] | None = None  # of a worker that has crashed

    @property
    def pid(self) -> int | None:
        """Return the process id, None before the process is there."""
        return self._child.pid

    @property
    def is_loading(self) -> bool:
        return self.started_at > 0 and not self._loaded.done()

    @property
    def loading(self) -> Progress | None:
        """Return how far the worker is in loading its model; None if it has not said so, or does not load it."""
        return None if self._loaded.done() else self._loading

    # --- life ---

    async def load(self, load: Load, timeout_s: float) -> Ready:
        """Spawn the process and load the model. Raises ModelLoadError; the process is killed then."""
        began, self.started_at = time.monotonic(), time.time()
        try:
            async with asyncio.timeout(timeout_s):
                await self._child.spawn(self._link, load, self._environment)
                self._health.watch_processes()
                ready = await self._loaded
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
        self._health.watch_heartbeat()
        self.requests.batch_size = ready.batch_size
        self.requests.window = ready.window
        self.requests.progressed_at = time.monotonic()
        self.load_s = self.requests.progressed_at - began
        self.ready_at = time.time()
        return ready

    def set_log_level(self, level: str, name: str) -> None:
        if self._child.pid is not None:  # otherwise Load, which is always the first message, carries the level
            self._link.send(SetLogLevel(level, name))

    def retire(self, deadline_s: float) -> None:
        """Let the worker finish what it holds within `deadline_s` seconds, and then exit by itself."""
        self.is_retiring = True
        self._link.send(Shutdown(deadline_s))

    async def shutdown(self, deadline_s: float) -> None:
        """Let the worker finish and exit; kill it after `deadline_s` seconds."""
        self.retire(deadline_s)
        await self._child.exit_within(deadline_s)
        self.kill()
        await self.reap()

    def kill(self) -> None:
        """Kill the process and every process that it started."""
        self._child.kill()

    async def reap(self) -> None:
        """Wait for the worker's end and for the last lines of its log; kill it if it does not end by itself."""
        await self._child.wait_started()
        self._health.stop()
        await self._child.reap()
        if self._report is not None:
            WorkerLogger(logger, self.name).error("%s", self._report())
            self._report = None

    # --- what arrives ---

    def _on_message(self, message: FromWorker) -> None:
        match message:
            case Frames(items):
                self._on_items(self, items)
            case Stats(gauges, progressed, loading):
                self.gauges = gauges
                self._loading = None if loading is None else loading.bound()
                self._health.beat()
                self.requests.note_progress(progressed)
            case Ready():
                if not self._loaded.done():
                    self._loaded.set_result(message)
            case Failed(kind, text):
                cause = error_from_kind(kind, text)
                self._fail_loading(cause if isinstance(cause, ModelLoadError) else ModelLoadError(cause.message))
            case Leaving():
                self._on_ending(self)
                self._link.send(Shutdown(0.0))  # tells the worker that no request is on its way any more
                self.is_retiring = True

    # --- what ends ---

    def _on_exit(self, reason: str, out_of_memory: bool) -> None:
        self._end = reason
        text = f"the worker process {reason} while it loaded the model"
        self._failure = ModelLoadError(text)
        if out_of_memory:
            self._end += ", because the machine or its container ran out of memory"
            self._failure = ModelMemoryError(f"{text}: the machine or its container ran out of memory")
            self.cause = ModelMemoryError("The worker process ran out of memory while it held the request")
        # What the worker sent before its end may be unread, such as why its load failed. The end of the link is behind
        # that, unless another process holds the link open, or the worker has not connected.
        if self._link_is_lost:
            self._fail_loading(self._failure)
        else:
            self._loop.call_later(EXIT_GRACE_S, self._fail_loading, self._failure)
        if self.is_ending:
            self._bury()
        else:
            # A process that it has left behind may hold the link open. What the worker itself sent is read until then.
            self._loop.call_later(EXIT_GRACE_S, self._link.abort)

    def _on_hung(self, reason: str) -> None:
        self._fail_loading(ModelLoadError(f"{reason} while it loaded the model"))
        self.kill()

    def _on_rank_lost(self, rank: int) -> None:
        """End the group when its first rank ends, unless the whole group is about to end by itself."""
        if self._child.exited.is_set() or self._child.killed:
            return
        if self.is_retiring or not self._loaded.done():
            self._loop.call_later(EXIT_GRACE_S, self.kill)
            return
        WorkerLogger(logger, self.name).error("rank %d has ended; killing the others", rank)
        self.kill()

    def _on_link_lost(self) -> None:
        self._health.stop()
        self._link_is_lost = True
        self._child.link_lost()
        if self._failure is not None:
            self._fail_loading(self._failure)
        if not self._loaded.done():
            # The exit code says more than the end of the link, so it gets a moment to arrive.
            self._loop.call_later(EXIT_GRACE_S, self.kill)
            return
        self.is_ending = True
        self._on_ending(self)
        # How the process ends decides what its requests are told.
        if self._child.exited.is_set():
            self._bury()
        else:
            self._loop.call_later(EXIT_GRACE_S, self._bury)

    def _bury(self) -> None:
        """Report the end of a worker; a failed load has been reported with its reason."""
        if self.lost.is_set():
            return
        if not self.is_retiring and self._was_ready:
            begun = [job for job in self.requests.in_flight.values() if not job.is_ahead]
            inside = requests_inside(begun, time.monotonic())
            self._report = lambda: crash_report(self._end, inside, self._child.last_lines)
        self.lost.set()
        self.controls.fail_all()
        self._on_lost(self)

    @property
    def _was_ready(self) -> bool:
        loaded = self._loaded
        return loaded.done() and not loaded.cancelled() and loaded.exception() is None

    def _fail_loading(self, error: ModelLoadError) -> None:
        if not self._loaded.done():
            self._loaded.set_exception(error)


def _mark_retrieved(loaded: asyncio.Future[Ready]) -> None:
    """Mark the exception as retrieved, so that asyncio does not log it: nothing awaits a worker that was killed."""
    if not loaded.cancelled():
        loaded.exception()


def requests_inside(jobs: Iterable[Job], now: float) -> list[str]:
    """Return a line for each request that a worker held at `now`."""
    return [
        f"{job.request.request_id} on {job.request.route}, {now - job.sent_at:.1f} s after it was sent" for job in jobs
    ]


def crash_report(end: str, inside: Sequence[str], last_lines: Sequence[str]) -> str:
    """Return the report of a worker that ended as `end` says."""
    parts = [f"crash report: the worker process {end}", f"requests inside: {len(inside)}"]
    parts += [f"    {line}" for line in islice(inside, _NAMED_REQUESTS)]
    if last_lines:
        parts += ["last lines of its log:", *(f"    {line}" for line in last_lines)]
    return "\n".join(parts)
