"""The life of a worker process, from Load to Shutdown: one model on one link."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from lmi_server.contract.errors import (
    EXITS,
    LmiServerError,
    ModelMemoryError,
    WorkerDiedError,
    exit_message,
    failure_of,
)
from lmi_server.contract.link import FrontendLink
from lmi_server.contract.progress import Progress
from lmi_server.contract.protocol import (
    Cancel,
    Control,
    Error,
    Failed,
    Frames,
    Hold,
    Item,
    Load,
    Recall,
    Reply,
    SetLogLevel,
    Shutdown,
    Stats,
    Submit,
    ToWorker,
    Waiting,
)
from lmi_server.processes import load_progress
from lmi_server.worker.answers.frame_buffer import ResponseWriter
from lmi_server.worker.handler_loading import load_failure
from lmi_server.worker.memory_limit import excess
from lmi_server.worker.services.base import WorkerService

logger = logging.getLogger(__name__)

_STATS_INTERVAL_S = 1.0


class Worker:
    """Acts on the messages of the front end, on the link's event loop.

    `make_service` gets the link and returns the service of the model. `ending` is true once the worker closes the link
    itself; `exit_code` is that of the process.
    """

    def __init__(self, load: Load, make_service: Callable[[FrontendLink], WorkerService]) -> None:
        self.ending = False
        self.exit_code = 0
        self._model_name = load.model_name
        self._memory_limit_mb = load.memory_limit_mb
        self._make_service = make_service
        self._link: FrontendLink | None = None
        self._service: WorkerService | None = None
        self._loading: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._stopping = False

    def attach(self, link: FrontendLink) -> None:
        """Load the model, answer over `link` from now on, and send a heartbeat once a second."""
        self._link = link
        self._loading = self._run(self._load())
        self._run(self._send_stats())

    def on_message(self, message: ToWorker) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Cancel(request_id):
                self._drop(request_id, unless_begun=False)
            case Hold(request_id, held):
                self._hold(request_id, held)
            case Recall(request_id):
                self._drop(request_id, unless_begun=True)
            case Waiting(requests):
                self._load_service().note_waiting(requests)
            case Control():
                self._run(self._control(message))
            case SetLogLevel(level, name):
                logging.getLogger(name).setLevel(level)
            case Shutdown(deadline_s):
                self.shut_down(deadline_s)

    def shut_down(self, deadline_s: float) -> None:
        """Finish what runs within `deadline_s` seconds, stop the handler, end. A second call does nothing."""
        if not self._stopping:
            self._stopping = True
            self._run(self._shut_down(deadline_s))

    def end(self, exit_code: int) -> None:
        """Send the rest and close the link; the process ends then."""
        assert self._link is not None
        self.exit_code = exit_code
        self.ending = True
        self._link.close()

    # --- the model ---

    async def _load(self) -> None:
        assert self._link is not None
        try:
            self._service = self._make_service(self._link)
            ready = await self._service.load()
        except LmiServerError as error:
            self._fail(load_failure(error))
        except BaseException as error:  # the border to handlers and engines, which raise anything; the load fails
            if self._stopping or self.ending:
                raise  # the load was cancelled
            logger.exception("model %s: the handler raised while it loaded", self._model_name)
            self._fail(load_failure(error))
        else:
            self._link.send(ready)
            self._link.send(Stats(dict(self._service.gauges())))

    def _fail(self, error: LmiServerError) -> None:
        assert self._link is not None
        self._link.send(Failed(error.kind, error.message))
        self.end(exit_code=1)

    async def _shut_down(self, deadline_s: float) -> None:
        service = self._service
        if service is not None:
            await self._finish(service, deadline_s)
        if self._loading is not None:
            self._loading.cancel()
        if service is not None:
            service.buffer.close()  # the front end sees the link end, and retries or fails what is left
            await service.stop()
        self.end(exit_code=0)

    async def _finish(self, service: WorkerService, deadline_s: float) -> None:
        """Wait until no request is left, for `deadline_s` seconds at most."""
        try:
            async with asyncio.timeout(deadline_s):
                await service.buffer.wait_idle()
        except TimeoutError:
            stack = service.stack()
            if stack:
                logger.error("requests still run after %g seconds; the handler is at:\n%s", deadline_s, stack)

    async def _send_stats(self) -> None:
        assert self._link is not None
        while not self.ending:
            is_loading = self._loading is None or not self._loading.done()
            self._link.send(_stats(self._service, load_progress.last() if is_loading else None))
            await asyncio.sleep(_STATS_INTERVAL_S)
            if self._service is not None:
                self._tick(self._service)

    def _tick(self, service: WorkerService) -> None:
        """Look after the process; the loop of the link does so once a second, whatever the handler's code does."""
        service.tick()
        taken = excess(self._memory_limit_mb)
        if taken is not None:
            self._give_up(service, taken)

    def _give_up(self, service: WorkerService, reason: str) -> None:
        """End the process although the handler is at work; the load fails if it is not complete.

        The begun requests fail with the reason, because they may be the cause. Waiting ones get no answer here: the
        front end gives them to another worker.
        """
        error = ModelMemoryError(reason)
        stack = service.stack()
        service.buffer.flush()  # answers that are complete by now end as they are
        begun = [writer for writer in service.buffer.writers.values() if writer.has_begun and not writer.ended]
        details = f"{reason}\nThe handler was at:\n{stack}" if begun and stack else reason
        logger.error("model %s: %s", self._model_name, details)
        for writer in begun:
            writer.format_error = None  # its stream may be at work in the handler's thread
            writer.fail(error)
        service.buffer.close()
        service.abandon()
        if self._loading is not None and self._loading.done():
            self.end(exit_code=1)
        else:
            self._fail(error)

    # --- requests ---

    def _load_service(self) -> WorkerService:
        assert self._service is not None, "the front end sends requests only after Ready"
        return self._service

    def _submit(self, submit: Submit) -> None:
        # A request that crosses the Shutdown on the link is dropped. The front end sees the link end without an answer
        # to it, and gives it to another worker.
        if not self._stopping:
            service = self._load_service()
            service.submit(submit, service.buffer.new_writer(submit))

    def _writer(self, request_id: int) -> ResponseWriter | None:
        """Return the writer of a request; None if the end of its answer and a message about it crossed on the link."""
        return self._load_service().buffer.writers.get(request_id)

    def _drop(self, request_id: int, unless_begun: bool) -> None:
        writer = self._writer(request_id)
        if writer is not None:
            self._load_service().drop(writer, unless_begun)

    def _hold(self, request_id: int, held: bool) -> None:
        writer = self._writer(request_id)
        if writer is not None:
            writer.is_held = held  # its stream looks at this, in whatever thread it is

    async def _control(self, control: Control) -> None:
        assert self._link is not None
        outcome: Item
        try:
            outcome = Reply(control.id, 200, [], await self._load_service().control(control.command))
        except LmiServerError as error:
            outcome = Error(control.id, error.kind, error.message)
        except BaseException as error:  # the border to handlers and engines, which raise anything; the command fails
            if self._stopping:
                raise
            logger.exception("model %s: the handler raised in %s", self._model_name, control.command.operation)
            failure = _command_failure(error)
            outcome = Error(control.id, failure.kind, failure.message)
        self._link.send(Frames([outcome]))

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that the worker keeps alive; if it raises, the process ends with an error."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("the worker cannot go on", exc_info=task.exception())
            self.end(exit_code=1)


def _stats(service: WorkerService | None, loading: Progress | None) -> Stats:
    if service is None:
        return Stats({}, loading=loading)
    return Stats(dict(service.gauges()), service.buffer.take_progressed(), loading)


def _command_failure(error: BaseException) -> LmiServerError:
    if isinstance(error, EXITS):
        return WorkerDiedError(exit_message(error))
    return failure_of(error)
