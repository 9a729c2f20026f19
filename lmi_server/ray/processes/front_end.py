"""The replica's end of a connection to a front end, and the requests that came over it.

The replica answers as a worker does (`lmi_server.contract.protocol`). Its pool restarts a worker process that dies,
without Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from lmi_server.contract.errors import LmiServerError, ModelNotReadyError, RequestError
from lmi_server.contract.link import FrontendLink, frontend_link
from lmi_server.contract.protocol import (
    CANCELLED,
    RECALLED,
    AddAdapter,
    Cancel,
    Chunk,
    Command,
    Control,
    Error,
    Frame,
    Frames,
    GetMetrics,
    Head,
    Hold,
    Input,
    Item,
    Leaving,
    Ready,
    RemoveAdapter,
    Reply,
    Shutdown,
    Stats,
    Submit,
    ToWorker,
)
from lmi_server.serving.adapters.adapter_store import OnDemand
from lmi_server.serving.adapters.adapters import RegisteredAdapter
from lmi_server.serving.pool.engine_metrics import engine_metrics
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.supervisor.job import Job, ReplySlot

logger = logging.getLogger(__name__)


def _nothing() -> None: ...


class FrontEndConnection:
    """One connection. `on_gone` is called once, when it has ended."""

    def __init__(self, pool: WorkerPool, on_gone: Callable[[FrontEndConnection], None]) -> None:
        self._pool = pool
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[int, Job] = {}
        self._waiting: dict[int, asyncio.Task[None]] = {}  # requests that wait for their adapters
        self._items: list[Frame] = []
        self._reported_at = 0.0
        self._leaving = False
        self._is_last_known = False  # the front end has said that it sends no more requests
        self._calls: set[asyncio.Task[None]] = set()
        self.link: FrontendLink = frontend_link(self._on_message, self._on_lost)

    @property
    def holds(self) -> int:
        """Return the number of its requests that have not ended."""
        return len(self._jobs) + len(self._waiting)

    def greet(self) -> None:
        """Say that the model is loaded."""
        batch_size = None if self._pool.members.batch_size is None else 1  # the batches are formed here
        self.link.send(Ready(self._pool.members.max_model_len, {}, batch_size))

    def leave(self) -> None:
        """Take no more requests; close the connection when the last one has ended."""
        if not self._leaving:
            self._leaving = True
            self.link.send(Leaving())

    def report(self) -> None:
        """Send the heartbeat."""
        since, self._reported_at = self._reported_at, time.monotonic()
        progressed = [number for number, job in self._jobs.items() if job.reply.progressed_at >= since]
        progressed += self._waiting
        gauges = next(iter(self._pool.roster.gauges.values()), {})
        self.link.send(Stats(dict(gauges), progressed))

    # --- what arrives ---

    def _on_message(self, message: ToWorker) -> None:
        match message:
            case Submit(number, request):
                self._submit(number, request)
            case Cancel(number):
                job = self._jobs.get(number)
                if job is not None:
                    self._pool.dispatcher.cancel(job)
                elif number in self._waiting:
                    self._waiting.pop(number).cancel()
                    self.send(Error(number, CANCELLED, "the client went away"))
            case Hold(number, held):
                job = self._jobs.get(number)
                if job is not None and job.holder is not None:
                    job.holder.hold(job, held)
            case Control(number, command):
                call = self._loop.create_task(self._do(number, command))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
            case Shutdown():
                self._is_last_known = True
                self.leave()
                self._close_if_done()
            case _:  # a replica recalls nothing, and the actor says what it loads
                logger.warning("a front end sent a %s, which a replica does not take", type(message).__name__)

    def _submit(self, number: int, request: Input) -> None:
        if self._leaving:
            self.send(Error(number, RECALLED, "the replica ends"))
            return
        if self._pool.on_demand is None:
            reply = RelayedReply(number, self)
            try:
                job = self._pool.submit(request, _nothing, reply=reply)
            except LmiServerError as error:
                self._refuse(number, error)
            else:
                self._keep(number, job)
            return
        waiting = self._submit_holding(self._pool.on_demand, number, request)
        self._waiting[number] = self._loop.create_task(waiting)

    async def _submit_holding(self, on_demand: OnDemand, number: int, request: Input) -> None:
        reply = RelayedReply(number, self, lambda: on_demand.release(request))
        try:
            job = await self._pool.submit_holding(on_demand, request, _nothing, reply=reply)
        except LmiServerError as error:
            self._refuse(number, error)
        else:
            self._keep(number, job)
        finally:
            self._waiting.pop(number, None)

    def _refuse(self, number: int, error: LmiServerError) -> None:
        kind = RECALLED if isinstance(error, ModelNotReadyError) else error.kind
        self.send(Error(number, kind, error.message, retry_after=error.retry_after))

    def _keep(self, number: int, job: Job) -> None:
        if job.reply.terminal is None:
            self._jobs[number] = job

    async def _do(self, number: int, command: Command) -> None:
        try:
            answer = await _command(self._pool, command)
        except LmiServerError as error:
            self.send(Error(number, error.kind, error.message))
        else:
            self.send(Reply(number, 200, [], answer))

    # --- what leaves ---

    def send(self, item: Item) -> None:
        """Send `item` at the end of this turn of the loop, together with the others of the turn."""
        if not self._items:
            self._loop.call_soon(self._flush)
        self._items.append(item)

    def _flush(self) -> None:
        items, self._items = self._items, []
        self.link.send_now(Frames(items))
        self._close_if_done()

    def forget(self, number: int) -> None:
        """Forget a request that has ended."""
        self._jobs.pop(number, None)

    def _close_if_done(self) -> None:
        if self._is_last_known and not self.holds and not self._items:
            self.link.close()

    def _on_lost(self) -> None:
        for job in list(self._jobs.values()):
            self._pool.dispatcher.cancel(job)
        self._jobs.clear()
        for task in self._waiting.values():
            task.cancel()
        self._waiting.clear()
        self._on_gone(self)


class RelayedReply(ReplySlot):
    """The reply slot of a request that a front end waits for: everything is sent on, under the front end's number.

    `on_end` is called with the terminal item.
    """

    __slots__ = ("_front_end", "_number", "_on_end")

    def __init__(self, number: int, front_end: FrontEndConnection, on_end: Callable[[], None] = _nothing) -> None:
        super().__init__()
        self._number = number
        self._front_end = front_end
        self._on_end = on_end

    def put(self, item: Item, now: float) -> None:
        if self.terminal is not None:
            return
        self.progressed_at = now
        if isinstance(item, Chunk):
            self._front_end.send(Chunk(self._number, item.data))
            return
        if isinstance(item, Head):
            self.head = item
        else:
            self.terminal = item
            self._front_end.forget(self._number)
            self._on_end()
        self._front_end.send(msgspec.structs.replace(item, id=self._number))


async def _command(pool: WorkerPool, command: Command) -> bytes:
    """Do with the model what a front end asks for; return the answer."""
    match command:
        case AddAdapter(adapter):
            adapters = pool.adapters
            if adapter.name not in adapters:
                return (await adapters.register(RegisteredAdapter(adapter=adapter, source=adapter.directory))).encode()
            if adapters.get(adapter.name).adapter == adapter:
                return b""  # another front end, or the model directory, has brought it
            return (await adapters.update(RegisteredAdapter(adapter=adapter, source=adapter.directory))).encode()
        case RemoveAdapter(name):
            return (await pool.adapters.remove(name)).encode() if name in pool.adapters else b""
        case GetMetrics():
            return next(iter((await engine_metrics(pool.roster.ready)).values()), b"")
    raise RequestError(f"a replica of a cluster does not take {command.operation}; send it to a single server")
