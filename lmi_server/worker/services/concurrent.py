"""Serves requests concurrently: each is a task of an event loop, that of the link or one of the handler's thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

import uvloop

from lmi_server.contract.errors import EXITS
from lmi_server.contract.protocol import Command, Ready, Submit
from lmi_server.processes import model_imports
from lmi_server.worker.answers.frame_buffer import FrameBuffer, ResponseWriter
from lmi_server.worker.processors.base import RequestProcessor
from lmi_server.worker.services.base import WorkerService

logger = logging.getLogger(__name__)


class ConcurrentService(WorkerService):
    """Serves as many requests at once as the front end sends, on the running event loop."""

    def __init__(self, processor: RequestProcessor, buffer: FrameBuffer) -> None:
        self.buffer = buffer
        self._processor = processor
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loaded = False

    async def load(self) -> Ready:
        info = await self._processor.start()
        self._loaded = True
        model_imports.finish_loading()
        return Ready(info.max_model_len, dict(info.details), window=info.window)

    def submit(self, submit: Submit, writer: ResponseWriter) -> None:
        task = asyncio.create_task(self._processor.process(submit.input, writer))
        self._tasks[writer.id] = task
        task.add_done_callback(lambda _: self._on_done(writer))

    def _on_done(self, writer: ResponseWriter) -> None:
        del self._tasks[writer.id]
        writer.drop()  # before its first step, if it has not ended: `process` never ran

    def drop(self, writer: ResponseWriter, unless_begun: bool) -> None:
        task = self._tasks.get(writer.id)
        if task is not None and not (unless_begun and writer.has_begun):
            writer.is_recalled = unless_begun
            task.cancel()

    async def control(self, command: Command) -> bytes:
        return await self._processor.control(command)

    def note_waiting(self, requests: int) -> None:
        self._processor.note_waiting(requests)

    async def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        if self._loaded:
            await self._processor.stop()

    def gauges(self) -> Mapping[str, float]:
        if not self._loaded:
            return {}
        try:
            return dict(self._processor.stats())
        except Exception:  # the border to handlers: gauges that cannot be read must not end the model
            logger.exception("the handler raised in stats()")
            return {}


class LoopRunner:
    """Runs a `ConcurrentService` in the handler's thread. All but `run` is for the link's thread."""

    def __init__(
        self, processor: RequestProcessor, buffer: FrameBuffer, on_exit: Callable[[BaseException], None]
    ) -> None:
        """`on_exit` gets an exception that ends the process, before the requests beside it are cancelled."""
        self._processor = processor
        self._buffer = buffer
        self._on_exit = on_exit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._service: ConcurrentService
        self._stopping: asyncio.Event
        self._stop_requested = False

    def run(self, on_ready: Callable[[Ready], None]) -> None:
        """Load the model, call `on_ready`, then serve until `stop`. Raises what the handler raises, EXITS included."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                runner.run(self._serve(on_ready))
            except EXITS as error:
                # The end of the runner cancels every other request. None of them must report that: the front end sees
                # the link end, and gives a request to another worker if its client has not received a byte.
                self._buffer.seal()
                self._on_exit(error)  # now, because the runner waits for tasks, and a task may ignore a cancellation
                raise

    async def _serve(self, on_ready: Callable[[Ready], None]) -> None:
        self._stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._service = ConcurrentService(self._processor, self._buffer)
        on_ready(await self._service.load())
        if not self._stop_requested:  # it may come while the model loads
            await self._stopping.wait()
        await self._service.stop()

    def submit(self, submit: Submit, writer: ResponseWriter) -> None:
        self._running_loop().call_soon_threadsafe(self._service.submit, submit, writer)

    def drop(self, writer: ResponseWriter, unless_begun: bool) -> None:
        self._running_loop().call_soon_threadsafe(self._service.drop, writer, unless_begun)

    async def control(self, command: Command) -> bytes:
        done = asyncio.run_coroutine_threadsafe(self._service.control(command), self._running_loop())
        return await asyncio.wrap_future(done)

    def stop(self) -> None:
        """Have `run` return soon; it may come while the model loads."""
        self._stop_requested = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the handler has ended the loop
                self._loop.call_soon_threadsafe(self._stopping.set)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "requests come once the model is loaded"
        return self._loop
