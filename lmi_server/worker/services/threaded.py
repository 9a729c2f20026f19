"""Runs the code of a `RequestHandler` in the main thread, while the event loop of the link lives in another thread.

Code of one's own may block for minutes, fork, and set signal handlers; the last two work in the main thread only. The
link must go on meanwhile: the front end takes a worker without heartbeats for dead.

    link's thread      ThreadedService.submit -> runner.submit     a queue, or the event loop of the handler's thread
    handler's thread   runner.run -> handler -> ResponseWriter     into the FrameBuffer
    link's thread      FrameBuffer.flush -> link                   one wake-up for all that has come together
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import FrameType

from lmi_server.contract.batch_progress import BatchProgress
from lmi_server.contract.errors import EXITS, ModelLoadError, describe, exit_message
from lmi_server.contract.handler import LLMHandler, RequestHandler
from lmi_server.contract.link import FrontendLink
from lmi_server.contract.protocol import Command, Ready, Submit
from lmi_server.worker.answers.frame_buffer import FrameBuffer, ResponseWriter
from lmi_server.worker.handler_loading import Loading
from lmi_server.worker.memory_limit import resident_bytes
from lmi_server.worker.processors.base import RequestProcessor
from lmi_server.worker.processors.generation import GenerationProcessor
from lmi_server.worker.processors.responses import ResponseProcessor
from lmi_server.worker.services.base import WorkerService
from lmi_server.worker.services.batches import QueueRunner
from lmi_server.worker.services.concurrent import LoopRunner

logger = logging.getLogger(__name__)

_STOP_S = 5.0  # for RequestHandler.stop
_LOGGED_AT = 0.8  # of predict_timeout; at 1.0 the front end kills the process, and nothing could tell where it was


class LoadOutcome:
    """Is set once. A failure that is said later changes nothing."""

    def __init__(self) -> None:
        self._result: Future[Ready] = Future()
        self._result.set_running_or_notify_cancel()  # a shutdown cancels who waits for it, but not the future itself

    async def wait(self) -> Ready:
        """Return once the model is loaded. Raises the error with which it could not be."""
        return await asyncio.wrap_future(self._result)

    def succeed(self, ready: Ready) -> None:
        """Say that the model is loaded."""
        self._result.set_result(ready)

    @property
    def is_loaded(self) -> bool:
        return self._result.done() and self._result.exception() is None

    def fail(self, error: BaseException) -> None:
        """Say that the model could not be loaded; what ends processes becomes a ModelLoadError."""
        if self._result.done():
            return
        if isinstance(error, EXITS):
            error = ModelLoadError(exit_message(error))
        elif not isinstance(error, Exception):
            error = ModelLoadError(describe(error))
        self._result.set_exception(error)


class ThreadedService(WorkerService):
    """Loads the model and runs its requests in the main thread, in `run`; the rest is for the link's thread."""

    def __init__(self, handler: RequestHandler, loading: Loading, progress: BatchProgress) -> None:
        self.abandoned = False  # nothing waits for what the handler does
        self._handler = handler
        self._loading = loading
        self._progress = progress
        self._runner: QueueRunner | LoopRunner | None = None  # from the moment that the handler has started
        self._link_loop: asyncio.AbstractEventLoop | None = None
        self._on_exit: Callable[[int], None]
        self._exit_code = 0
        self._stopping = False
        self._hang_is_logged = False
        self._outcome = LoadOutcome()
        self._start = threading.Event()
        self._ended: Future[None] = Future()
        self._pid = os.getpid()
        self._ident = threading.get_ident()

    # --- the link's thread ---

    def attach(self, link: FrontendLink, on_exit: Callable[[int], None]) -> ThreadedService:
        """Answer over `link`; call `on_exit` in this thread's loop if the handler ends the process."""
        self.buffer = FrameBuffer(link, from_other_thread=True)
        self._on_exit = on_exit
        self._link_loop = asyncio.get_running_loop()
        return self

    async def load(self) -> Ready:
        self._start.set()
        return await self._outcome.wait()

    def submit(self, submit: Submit, writer: ResponseWriter) -> None:
        self._running().submit(submit, writer)

    def drop(self, writer: ResponseWriter, unless_begun: bool) -> None:
        self._running().drop(writer, unless_begun)

    async def control(self, command: Command) -> bytes:
        return await self._running().control(command)

    def _running(self) -> QueueRunner | LoopRunner:
        assert self._runner is not None, "requests come once the model is loaded"
        return self._runner

    async def stop(self) -> None:
        await asyncio.wait([asyncio.wrap_future(self.end_run())], timeout=_STOP_S)

    def end_run(self) -> Future[None]:
        """Have `run` return; the result is done once it has. Called again it changes nothing."""
        if not self._stopping:
            self._stopping = True
            if self._runner is not None:
                self._runner.stop()
            self._start.set()
        return self._ended

    def gauges(self) -> Mapping[str, float]:
        return {"running_requests": len(self.buffer.writers), "resident_bytes": resident_bytes()}

    def tick(self) -> None:
        """Log where the handler's code is, once for each batch that takes almost too long."""
        running_s = self._progress.running_s(time.monotonic())
        hangs = running_s >= _LOGGED_AT * self._loading.options.predict_timeout
        if hangs and not self._hang_is_logged:
            text = "model %s: the handler has not returned for %.0f s; it is at:\n%s"
            logger.error(text, self._loading.load.model_name, running_s, self.stack())
        self._hang_is_logged = hangs

    def stack(self) -> str:
        frame: FrameType | None = sys._current_frames().get(self._ident)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def abandon(self) -> None:
        self.abandoned = True

    def call_link(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the link's thread call `function`, if there is a link; from any thread, and from signal handlers."""
        if self._link_loop is not None:
            self._link_loop.call_soon_threadsafe(function, *arguments)

    # --- the handler's thread ---

    def run(self) -> int:
        """Load the model, run requests, stop the handler; return the exit code of the process.

        It returns after `end_run`, or if the handler ends the process.
        """
        self._start.wait()
        try:
            if not self._stopping:
                self._serve()
        except EXITS as error:
            self._exit(error)
        except BaseException:  # the border to handlers, which raise anything at their end too
            logger.exception("the worker cannot go on")
            self._leave()
        finally:
            self._ended.set_result(None)
        return self._exit_code

    def _serve(self) -> None:
        try:
            runner = self._runner = self._start_handler()
            # `end_run` sets its flag and then looks for a runner; this sets the runner and then looks at the flag. So
            # one of the two stops it, however the threads run.
            if self._stopping:
                runner.stop()
            runner.run(self._outcome.succeed)
        except BaseException as error:
            if not self._outcome.is_loaded:
                self._outcome.fail(error)
                return
            if not isinstance(error, EXITS):
                raise
            self._exit(error)
        self._handler.stop()

    def _start_handler(self) -> QueueRunner | LoopRunner:
        """Load the model, as far as its handler does so by itself, and return what runs its requests."""
        info = self._handler.start(self._loading.model_dir, self._loading.options)
        handler = self._handler.concurrent_handler()
        if handler is None:
            ready = Ready(info.max_model_len, dict(info.details), self._loading.load.batch_size)
            return QueueRunner(self._handler, ready, self._progress, self.buffer)
        processor: RequestProcessor = (
            GenerationProcessor(handler, self._loading)
            if isinstance(handler, LLMHandler)
            else ResponseProcessor(handler, info, self._handler.served_names[0])
        )
        return LoopRunner(processor, self.buffer, self._on_loop_exit)

    def _on_loop_exit(self, error: BaseException) -> None:
        """End the process, or fail the load, before the event loop of the handler has come to its end: it may hang."""
        if self._outcome.is_loaded:
            self._exit(error)
        else:
            self._outcome.fail(error)

    def _exit(self, error: BaseException) -> None:
        """End the process, as the handler wants it."""
        if os.getpid() != self._pid:
            os._exit(0)  # the handler has forked it
        if not self._exit_code:  # else `_on_loop_exit` was first
            logger.error("the handler ended its process", exc_info=error)
            self._leave()

    def _leave(self) -> None:
        """Have the process end."""
        self._exit_code = 1
        self.call_link(self._on_exit, 1)
