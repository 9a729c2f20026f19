"""Runs the code of a `RequestHandler` in the main thread, while the event loop of the link lives in another one.

Code of one's own may block for minutes, fork, and set signal handlers; the last two work in the main thread only. The
link must go on meanwhile: the front end takes a worker without heartbeats for dead.

    link's thread      ThreadedService.submit -> Runner.submit     a queue, or the event loop of the handler's thread
    handler's thread   Runner.run -> handler -> ResponseWriter     into the FrameBuffer
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
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType

from lmi_server.configuration.options import ModelOptions
from lmi_server.contract.batch_progress import BatchProgress
from lmi_server.contract.errors import EXITS, LmiServerError, ModelLoadError, describe, exit_message
from lmi_server.contract.handler import AsyncRequestHandler, LLMHandler, ModelInfo, RequestHandler
from lmi_server.contract.protocol import Ready
from lmi_server.worker.answers.frame_buffer import FrameBuffer
from lmi_server.worker.concurrent_runner import ConcurrentRunner
from lmi_server.worker.handler_loading import Loading
from lmi_server.worker.processors.base import RequestProcessor
from lmi_server.worker.processors.generation import GenerationProcessor
from lmi_server.worker.processors.responses import ResponseProcessor
from lmi_server.worker.runner import Runner
from lmi_server.worker.services.batches import BatchRunner

logger = logging.getLogger(__name__)


class HandlerThread:
    """Loads the model and runs its requests. `run` returns after `stop`, or if the handler ends the process."""

    def __init__(self, handler: RequestHandler, loading: Loading, progress: BatchProgress) -> None:
        self.runner: Runner | None = None  # from the moment that the handler has started
        self.abandoned = False  # nobody waits for what the handler does
        self._handler = handler
        self._loading = loading
        self._progress = progress
        self._buffer: FrameBuffer
        self._link_loop: asyncio.AbstractEventLoop | None = None
        self._on_exit: Callable[[int], None]
        self._exit_code = 0
        self._stopping = False
        self._loaded: Future[Ready] = Future()
        self._loaded.set_running_or_notify_cancel()  # a shutdown cancels who waits for it, but not the future itself
        self._start = threading.Event()
        self._ended: Future[None] = Future()
        self._pid = os.getpid()
        self._ident = threading.get_ident()

    # --- the link's thread ---

    def attach(self, buffer: FrameBuffer, on_exit: Callable[[int], None]) -> None:
        """Send answers to `buffer`; call `on_exit` in this thread's loop if the handler ends the process."""
        self._buffer = buffer
        self._on_exit = on_exit
        self._link_loop = asyncio.get_running_loop()

    async def load(self) -> Ready:
        """Have the model loaded. Raises whatever the handler raises."""
        self._start.set()
        return await asyncio.wrap_future(self._loaded)

    def stop(self) -> Future[None]:
        """Have `run` return; the result is done once it has. Called again it changes nothing."""
        if not self._stopping:
            self._stopping = True
            if self.runner is not None:
                self.runner.stop()
            self._start.set()
        return self._ended

    def call_link(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the link's thread call `function`, if there is a link; from any thread, and from signal handlers."""
        if self._link_loop is not None:
            self._link_loop.call_soon_threadsafe(function, *arguments)

    @property
    def model_name(self) -> str:
        return self._loading.load.model_name

    @property
    def options(self) -> ModelOptions:
        return self._loading.options

    @property
    def memory_limit_mb(self) -> int:
        return self._loading.load.memory_limit_mb

    def running_s(self) -> float:
        """Return the seconds since the running batch began; 0.0 if none runs."""
        return self._progress.running_s(time.monotonic())

    def fail_load(self, error: LmiServerError) -> None:
        """Have the load fail, whatever the handler does about it."""
        self.abandoned = True
        if not self._loaded.done():
            self._loaded.set_exception(error)

    def stack(self) -> str:
        """Return the stack of the handler's thread, the innermost call last."""
        frame: FrameType | None = sys._current_frames().get(self._ident)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    # --- the handler's thread ---

    def run(self) -> int:
        """Load the model, run requests, stop the handler; return the exit code of the process."""
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
            self._run_requests(self._make_runner())
        except BaseException as error:
            if self._is_loaded():
                raise
            self._fail_loading(error)
        else:
            self._handler.stop()

    def _is_loaded(self) -> bool:
        return self._loaded.done() and self._loaded.exception() is None

    def _fail_loading(self, error: BaseException) -> None:
        if self._loaded.done():
            return
        if isinstance(error, EXITS):
            error = ModelLoadError(exit_message(error))
        elif not isinstance(error, Exception):
            error = ModelLoadError(describe(error))
        self._loaded.set_exception(error)

    def _make_runner(self) -> Runner:
        """Load the model, as far as its handler does so by itself, and return what runs its requests."""
        info = self._handler.start(self._loading.model_dir, self._loading.options)
        concurrent = self._handler.concurrent_handler()
        if concurrent is not None:
            return ConcurrentRunner(_processor(concurrent, self._loading, info), self._buffer, self._on_loop_exit)
        ready = Ready(info.max_model_len, dict(info.details), self._loading.load.batch_size)
        return BatchRunner(self._handler, ready, self._progress, self._buffer)

    def _run_requests(self, runner: Runner) -> None:
        self.runner = runner
        # `stop` sets its flag and then looks for a runner; this sets the runner and then looks at the flag. So one of
        # the two stops it, however the threads run.
        if self._stopping:
            runner.stop()
        try:
            runner.run(self._loaded.set_result)
        except EXITS as error:
            if not self._is_loaded():
                raise
            self._exit(error)

    def _on_loop_exit(self, error: BaseException) -> None:
        """End the process, or fail the load, before the event loop of the handler has come to its end: it may hang."""
        if self._is_loaded():
            self._exit(error)
        else:
            self._fail_loading(error)

    def _exit(self, error: BaseException) -> None:
        """End the process, as the handler wants it."""
        if os.getpid() != self._pid:
            os._exit(0)  # the handler has forked it
        if self._exit_code:
            return  # `_on_loop_exit` was first
        logger.error("the handler ended its process", exc_info=error)
        self._leave()

    def _leave(self) -> None:
        """Have the process end."""
        self._exit_code = 1
        self.call_link(self._on_exit, 1)


def _processor(handler: AsyncRequestHandler | LLMHandler, loading: Loading, info: ModelInfo) -> RequestProcessor:
    if isinstance(handler, LLMHandler):
        return GenerationProcessor(handler, loading)
    return ResponseProcessor(handler, info)
