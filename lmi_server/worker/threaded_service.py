"""Serves a handler that runs in a thread of its own: the link's side of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from lmi_server.contract.errors import ModelMemoryError
from lmi_server.contract.link import FrontendLink
from lmi_server.contract.protocol import Command, End, Error, Frames, Ready, Reply, Submit
from lmi_server.worker.answers.frame_buffer import FrameBuffer
from lmi_server.worker.memory_limit import Watch, resident_bytes
from lmi_server.worker.runner import Runner
from lmi_server.worker.services.base import WorkerService
from lmi_server.worker.services.threaded import HandlerThread

logger = logging.getLogger(__name__)

_STOP_S = 5.0  # for RequestHandler.stop


class ThreadedService(WorkerService):
    """Hands requests to the handler's thread, and watches it from this one."""

    def __init__(self, thread: HandlerThread, link: FrontendLink, on_exit: Callable[[int], None]) -> None:
        self._thread = thread
        self._watch = Watch(
            *(thread.model_name, thread.options.predict_timeout, thread.memory_limit_mb),
            running_s=thread.running_s,
            stack=thread.stack,
            give_up=self._give_up,
        )
        self._on_exit = on_exit
        self._running: set[int] = set()
        self._idle = asyncio.Event()
        self._ready = False
        self._buffer = FrameBuffer(_AccountedLink(link, self._note_ended), from_other_thread=True)
        thread.attach(self._buffer, on_exit)

    async def load(self) -> Ready:
        ready = await self._thread.load()
        self._ready = True
        return ready

    @property
    def _runner(self) -> Runner:
        assert self._thread.runner is not None, "requests come once the model is loaded"
        return self._thread.runner

    def submit(self, submit: Submit) -> None:
        self._running.add(submit.id)
        self._runner.submit(submit)

    def cancel(self, request_id: int) -> None:
        self._runner.cancel(request_id)

    def hold(self, request_id: int, held: bool) -> None:
        self._runner.hold(request_id, held)

    def recall(self, request_id: int) -> None:
        self._runner.recall(request_id)

    async def control(self, command: Command) -> bytes:
        return await self._runner.control(command)

    async def finish(self, deadline_s: float) -> None:
        if not self._running:
            return
        self._idle.clear()
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            logger.error(
                "requests still run after %g seconds; the handler is at:\n%s", deadline_s, self._thread.stack()
            )

    async def stop(self) -> None:
        self._buffer.close()
        await asyncio.wait([asyncio.wrap_future(self._thread.stop())], timeout=_STOP_S)

    def gauges(self) -> Mapping[str, float]:
        # The worker asks once a second, from a thread that runs whatever the handler does: a good moment to watch it.
        self._watch.look()
        return {"running_requests": len(self._running), "resident_bytes": resident_bytes()}

    def progressed(self) -> list[int]:
        return self._runner.progressed() if self._ready else []

    def _give_up(self, reason: str) -> None:
        """End the process although the handler is at work.

        The requests that the handler has begun fail with the reason, because they may be what takes the memory. Those
        that still wait get no answer here, so that the front end gives them to another worker.
        """
        error = ModelMemoryError(reason.partition("\n")[0])
        logger.error("model %s: %s", self._thread.model_name, reason)
        if not self._ready:
            self._thread.fail_load(error)
            return
        self._buffer.flush()  # answers that are complete by now end as they are
        for writer in self._runner.begun():
            writer.fail(error)
        self._buffer.close()
        self._thread.abandoned = True
        self._on_exit(1)

    def _note_ended(self, request_id: int) -> None:
        self._running.discard(request_id)
        if not self._running:
            self._idle.set()


class _AccountedLink:
    """Sends to the link, and reports each request that ends with what it sends."""

    def __init__(self, link: FrontendLink, on_ended: Callable[[int], None]) -> None:
        self._link = link
        self._on_ended = on_ended

    @property
    def congested(self) -> bool:
        return self._link.congested

    async def writable(self) -> None:
        await self._link.writable()

    def send_now(self, message: Frames) -> None:
        self._link.send_now(message)
        for item in message.items:
            if isinstance(item, Reply | End | Error):
                self._on_ended(item.id)
