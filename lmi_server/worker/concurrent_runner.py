"""Runs requests concurrently in the handler's thread, on an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import uvloop

from lmi_server.contract.errors import EXITS
from lmi_server.contract.protocol import Command, Ready, Submit
from lmi_server.worker.answers.frame_buffer import FrameBuffer, ResponseWriter
from lmi_server.worker.processors.base import RequestProcessor
from lmi_server.worker.runner import Runner
from lmi_server.worker.services.concurrent import ConcurrentService


class ConcurrentRunner(Runner):
    """Carries calls from the link's thread over to a `ConcurrentService` in the handler's."""

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
        await self._service.release()  # not `stop`: the buffer belongs to the link's thread, which has closed it

    def submit(self, submit: Submit) -> None:
        self._running_loop().call_soon_threadsafe(self._service.submit, submit)

    def cancel(self, request_id: int) -> None:
        self._running_loop().call_soon_threadsafe(self._service.cancel, request_id)

    def hold(self, request_id: int, held: bool) -> None:
        self._running_loop().call_soon_threadsafe(self._service.hold, request_id, held)

    def recall(self, request_id: int) -> None:
        """Do nothing: every request begins when it arrives."""

    async def control(self, command: Command) -> bytes:
        done = asyncio.run_coroutine_threadsafe(self._service.control(command), self._running_loop())
        return await asyncio.wrap_future(done)

    def stop(self) -> None:
        self._stop_requested = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the handler has ended the loop
                self._loop.call_soon_threadsafe(self._stopping.set)

    def begun(self) -> Sequence[ResponseWriter]:
        return list(self._service.writers.values())

    def progressed(self) -> list[int]:
        return self._service.progressed()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "requests come once the model is loaded"
        return self._loop
