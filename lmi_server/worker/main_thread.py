"""Serves a RequestHandler: its code runs in the main thread, as code that may do anything expects to, while the link's
event loop lives in another one and goes on however long a call takes.

    link's thread   InMainThread.submit -> MainThread.deliver        a queue, one entry per batch
    main thread     MainThread.run -> handler.handle -> Outgoing.put
    link's thread   Outgoing.leave -> link                           one wake-up for all that the main thread has put
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from types import FrameType
from typing import NamedTuple

from lmi_server.configuration.options import ModelOptions
from lmi_server.contract.batch_progress import BatchProgress
from lmi_server.contract.errors import (
    HandlerError,
    LmiServerError,
    ModelLoadError,
    ModelMemoryError,
    WorkerDiedError,
    is_out_of_memory,
)
from lmi_server.contract.handler import AsyncRequestHandler, LLMHandler, ModelInfo, RequestHandler, Response
from lmi_server.contract.protocol import End, Head, Ready, Reply
from lmi_server.worker.handler_loading import Loading
from lmi_server.worker.main_loop import MainLoop
from lmi_server.worker.outgoing import Call, Outgoing
from lmi_server.worker.serve import finish
from lmi_server.worker.service import cancelled
from lmi_server.worker.side_by_side import Generation, Responses, Serving

logger = logging.getLogger(__name__)

_FULL_PAUSE_S = 0.001
_FAILURES = (Exception, asyncio.CancelledError)  # what a handler may raise and be asked again
_EXITS = (SystemExit, KeyboardInterrupt)


class _Errand(NamedTuple):
    """What the handler is asked between two batches, and where its answer goes."""

    question: Callable[[RequestHandler], str]
    answer: Future[str]


class MainThread:
    """Runs the handler's code. `run` returns once `stop` was called, or the handler has ended the process."""

    def __init__(self, handler: RequestHandler, loading: Loading, progress: BatchProgress) -> None:
        self.outgoing: Outgoing  # from the moment there is a link
        self.waiting: dict[int, Call] = {}  # not begun; whoever takes a call out of it has it
        self.beside: MainLoop | None = None  # what serves instead; known once the model is loaded
        self.on_exit: Callable[[int], None]
        self.abandoned = False  # nobody waits for what the handler is at
        self._exit_code = 0
        self._stopping = False
        self._handler = handler
        self._loading = loading
        self._progress = progress
        self._inbox: SimpleQueue[Sequence[Call] | _Errand | None] = SimpleQueue()
        self._loaded: Future[Ready] = Future()
        self._loaded.set_running_or_notify_cancel()  # it is not to be cancelled with who waits for it
        self._start = threading.Event()
        self._ended: Future[None] = Future()
        self._pid = os.getpid()
        self._ident = threading.get_ident()

    # --- for the link's thread ---

    async def load(self) -> Ready:
        """Have the model loaded. Raises whatever the handler raises."""
        self._start.set()
        return await asyncio.wrap_future(self._loaded)

    def deliver(self, batch: Sequence[Call]) -> None:
        """Hand over a batch."""
        for call in batch:
            self.waiting[call.id] = call
        self._inbox.put(batch)

    async def ask(self, question: Callable[[RequestHandler], str]) -> str:
        """Ask the handler something between two batches. Raises whatever it raises."""
        errand = _Errand(question, Future())
        errand.answer.set_running_or_notify_cancel()  # it is not to be cancelled with who waits for it
        self._inbox.put(errand)
        return await asyncio.wrap_future(errand.answer)

    def stop(self) -> Future[None]:
        """Have `run` end after what was delivered; return what is done once it has. Called again it changes nothing."""
        if self._stopping:
            return self._ended
        self._stopping = True
        self._inbox.put(None)
        if self.beside is not None and self._loaded.done():
            self.beside.stop()
        self._start.set()
        return self._ended

    def call_link(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the link's thread call `function`, once there is a link; from any thread."""
        outgoing = getattr(self, "outgoing", None)
        if outgoing is not None:
            outgoing.loop.call_soon_threadsafe(function, *arguments)

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
        """Return for how many seconds the handler has been at its batch; 0.0 where it has none."""
        return self._progress.running_s(time.monotonic())

    def fail_load(self, error: LmiServerError) -> None:
        """Have the load fail, whatever the handler does about it."""
        self.abandoned = True
        if not self._loaded.done():
            self._loaded.set_exception(error)

    def stack(self) -> str:
        """Return where the main thread is, the innermost call last."""
        frame: FrameType | None = sys._current_frames().get(self._ident)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    # --- the main thread ---

    def run(self) -> int:
        """Load the model, answer what is delivered, stop the handler; return the exit code of the process."""
        self._start.wait()
        try:
            self._live()
        except _EXITS as error:
            self._exit((), error)
        except Exception:  # the border to handlers, which raise anything at their end too
            logger.exception("the worker cannot go on")
            self._leave()
        finally:
            self._ended.set_result(None)
        return self._exit_code

    def _live(self) -> None:
        try:
            info = self._handler.start(self._loading.model_dir, self._loading.options)
            beside = self._handler.side_by_side()
            if beside is not None:
                self.beside = MainLoop(_serving(beside, self._loading, info), self.outgoing)
                self.beside.run(self._loaded.set_result)
            else:
                self._ready(info)
                self._serve()
        except Exception as error:
            if self._loaded.done():
                raise
            self._loaded.set_exception(error)
        except _EXITS as error:
            if self._loaded.done():
                raise
            self._loaded.set_exception(ModelLoadError(_ended_by(error)))
        else:
            self._handler.stop()

    def _ready(self, info: ModelInfo) -> None:
        gc.collect()
        gc.freeze()  # what is loaded stays; without it every full collection would walk it
        batch_size = self._loading.load.batch_size
        self._loaded.set_result(Ready(info.max_model_len, dict(info.details), batch_size))

    def _serve(self) -> None:
        take = self._inbox.get
        begin = self.waiting.pop
        while (batch := take()) is not None:
            if isinstance(batch, _Errand):
                if not self._do(batch):
                    return
                continue
            begun = [call for call in batch if begin(call.id, None) is not None]
            self._progress.begin(time.monotonic())
            if begun:
                try:
                    self._answer(begun)
                except _EXITS as error:
                    self._exit(begun, error)
                    return
            self._progress.end(time.monotonic())

    def _do(self, errand: _Errand) -> bool:
        """Do what was asked for between two batches; return False where the handler ended its process with it."""
        try:
            answer = errand.question(self._handler)
        except _FAILURES as error:  # the border to handlers, which raise anything; the question fails with it
            self._end_fork()
            errand.answer.set_exception(_failure(error))
        except _EXITS as error:
            self._exit((), error)
            return False
        else:
            self._end_fork()
            errand.answer.set_result(answer)
        return True

    def _answer(self, batch: Sequence[Call]) -> None:
        """Answer every call of `batch`, whatever the handler does."""
        outcomes = self._outcomes(batch)
        self._end_fork()
        streams = []
        for call, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, LmiServerError):
                self.outgoing.fail(call, outcome)
            elif outcome.stream is not None:
                assert isinstance(outcome.stream, Iterator), "an asynchronous stream is for an AsyncRequestHandler"
                streams.append(_Stream(call, outcome, outcome.stream, self.outgoing))
            else:
                self.outgoing.end(call, Reply(call.id, outcome.status, outcome.headers, outcome.data))
                finish(outcome)
        while streams:
            streams = [stream for stream in streams if stream.advance()]
            self._end_fork()
            while streams and self.outgoing.is_full():
                time.sleep(_FULL_PAUSE_S)

    def _outcomes(self, batch: Sequence[Call]) -> Sequence[Response | LmiServerError]:
        try:
            outcomes = self._handler.handle([call.request for call in batch])
        except _FAILURES as error:  # the border to handlers, which raise anything; the requests end with it
            return [_failure(error)] * len(batch)
        if len(outcomes) != len(batch):
            return [HandlerError(f"the handler answered {len(outcomes)} of {len(batch)} requests")] * len(batch)
        return outcomes

    def _end_fork(self) -> None:
        """End a process that was forked from this one in the handler and came back: its parent gives the answer."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _exit(self, batch: Sequence[Call], error: BaseException) -> None:
        """End the process, as the handler wants it."""
        self._end_fork()
        logger.error("the handler ended its process", exc_info=error)
        for call in batch:
            if not call.ended:
                self.outgoing.fail(call, WorkerDiedError(_ended_by(error)))
        self._leave()

    def _leave(self) -> None:
        """Have the process end."""
        self._exit_code = 1
        self.call_link(self.on_exit, 1)


class _Stream:
    """An answer that leaves piece by piece. An error before the first of them has a status of its own."""

    def __init__(self, call: Call, response: Response, pieces: Iterator[bytes], outgoing: Outgoing) -> None:
        self._call = call
        self._response = response
        self._pieces = pieces
        self._outgoing = outgoing

    def advance(self) -> bool:
        """Send the next piece; return False at the end."""
        call, outgoing = self._call, self._outgoing
        if call.cancelled:
            self._close()
            outgoing.end(call, cancelled(call.id))
            return False
        try:
            piece = next(self._pieces)
        except StopIteration:
            self._begin()
            outgoing.end(call, End(call.id))
        except _FAILURES as error:  # the border to handlers, which raise anything; the stream ends with it
            outgoing.fail(call, _failure(error))
        else:
            if piece:
                self._begin()
                outgoing.put_chunk(call.id, piece)
            return True
        finish(self._response)
        return False

    def _begin(self) -> None:
        if not self._call.started:
            self._call.started = True
            self._outgoing.put(Head(self._call.id, self._response.status, self._response.headers))

    def _close(self) -> None:
        close = getattr(self._pieces, "close", None)
        try:
            if close is not None:
                close()
        except Exception:  # the border to handlers: nobody waits for this stream any more
            logger.exception("the stream of a client that is gone raised while it was closed")
        finish(self._response)


def _failure(error: BaseException) -> LmiServerError:
    if isinstance(error, LmiServerError):
        return error
    logger.error("the handler raised", exc_info=error)
    message = f"{type(error).__name__}: {error}"
    return ModelMemoryError(message) if is_out_of_memory(error) else HandlerError(message)


def _serving(handler: AsyncRequestHandler | LLMHandler, loading: Loading, info: ModelInfo) -> Serving:
    return Generation(handler, loading) if isinstance(handler, LLMHandler) else Responses(handler, info)


def _ended_by(error: BaseException) -> str:
    return f"The handler ended its process: {type(error).__name__}({error})"
