"""Serves requests concurrently: each is a task of an event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from lmi_server.contract.errors import LmiServerError, ModelMemoryError
from lmi_server.contract.protocol import Command, Ready, Submit
from lmi_server.processes import model_imports
from lmi_server.worker.answers.frame_buffer import FrameBuffer, ResponseWriter
from lmi_server.worker.memory_limit import excess
from lmi_server.worker.processors.base import RequestProcessor
from lmi_server.worker.services.base import WorkerService

logger = logging.getLogger(__name__)


def _ignore(_: LmiServerError) -> None:
    """Do nothing: without a limit there is nothing to give up for."""


class ConcurrentService(WorkerService):
    """Serves as many requests at once as the front end sends; their answers share `buffer`.

    `give_up` ends the process, which it must once it takes more than `memory_limit_mb` (0: any) MiB.
    """

    def __init__(
        self,
        processor: RequestProcessor,
        buffer: FrameBuffer,
        memory_limit_mb: int = 0,
        give_up: Callable[[LmiServerError], None] = _ignore,
    ) -> None:
        self._processor = processor
        self._buffer = buffer
        self._memory_limit_mb = memory_limit_mb
        self._give_up = give_up
        self._requests: dict[int, asyncio.Task[None]] = {}
        self.writers: dict[int, ResponseWriter] = {}
        """Those of the requests that run, by id."""
        self._loaded = False

    async def load(self) -> Ready:
        info = await self._processor.start()
        self._loaded = True
        model_imports.loaded()
        return Ready(info.max_model_len, dict(info.details), window=info.window)

    def submit(self, submit: Submit) -> None:
        writer = ResponseWriter(self._buffer, submit)
        writer.is_ahead = submit.ahead
        task = asyncio.create_task(self._processor.process(submit.input, writer))
        self._requests[submit.id] = task
        self.writers[submit.id] = writer
        task.add_done_callback(lambda _: self._on_done(writer))

    def _on_done(self, writer: ResponseWriter) -> None:
        del self._requests[writer.id]
        del self.writers[writer.id]
        writer.cancelled()  # before its first step, if it has not ended: `process` never ran

    def cancel(self, request_id: int) -> None:
        task = self._requests.get(request_id)  # none if the Cancel and the end of the answer crossed on the link
        if task is not None:
            task.cancel()

    async def control(self, command: Command) -> bytes:
        return await self._processor.control(command)

    def hold(self, request_id: int, held: bool) -> None:
        writer = self.writers.get(request_id)
        if writer is not None:
            writer.is_held = held

    def recall(self, request_id: int) -> None:
        writer = self.writers.get(request_id)
        if writer is not None and writer.is_ahead:
            writer.is_recalled = True
            self._requests[request_id].cancel()

    def note_waiting(self, requests: int) -> None:
        self._processor.note_waiting(requests)

    async def finish(self, deadline_s: float) -> None:
        if self._requests:
            await asyncio.wait(self._requests.values(), timeout=deadline_s)

    async def stop(self) -> None:
        self._buffer.close()  # the front end sees the link end, and retries or fails the rest
        await self.release()

    async def release(self) -> None:
        """Cancel what is left and release the model."""
        for task in self._requests.values():
            task.cancel()
        if self._requests:
            await asyncio.wait(self._requests.values())
        if self._loaded:
            await self._processor.stop()

    def gauges(self) -> Mapping[str, float]:
        # The worker asks once a second, which is a good moment to look.
        if (taken := excess(self._memory_limit_mb)) is not None:
            self._end(ModelMemoryError(taken))
        if not self._loaded:
            return {}
        try:
            return dict(self._processor.stats())
        except Exception:  # the border to handlers: gauges that cannot be read must not end the model
            logger.exception("the handler raised in stats()")
            return {}

    def _end(self, error: ModelMemoryError) -> None:
        """End the process. Every request fails with the reason, because it may be what takes the memory."""
        logger.error("%s", error.message)
        for writer in self.writers.values():
            writer.fail(error)
        self._buffer.close()
        self._give_up(error)

    def progressed(self) -> list[int]:
        # A copy: the handler's thread may add and remove requests while the link's thread looks at them.
        moved = [writer for writer in list(self.writers.values()) if writer.progressed]
        for writer in moved:
            writer.progressed = False
        return [writer.id for writer in moved]
