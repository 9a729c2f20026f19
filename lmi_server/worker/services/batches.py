"""Runs batches of requests in the handler's thread, one after the other."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

from lmi_server.contract.batch_progress import BatchProgress
from lmi_server.contract.errors import (
    EXITS,
    HandlerError,
    LmiServerError,
    WorkerDiedError,
    exit_message,
    failure_of,
)
from lmi_server.contract.handler import RequestHandler, Response
from lmi_server.contract.protocol import AddAdapter, Command, Input, Ready, RemoveAdapter, Submit
from lmi_server.processes import model_imports
from lmi_server.worker.answers.frame_buffer import FrameBuffer, ResponseWriter
from lmi_server.worker.processors import translation
from lmi_server.worker.processors.base import unsupported_error
from lmi_server.worker.processors.responses import call_after

logger = logging.getLogger(__name__)

_FULL_PAUSE_S = 0.001


class _Call(NamedTuple):
    request: Input
    writer: ResponseWriter


class _ControlCall(NamedTuple):
    """A command that the handler executes between two batches, and where its answer goes."""

    command: Command
    answer: Future[str]


class QueueRunner:
    """Hands batches to a `RequestHandler`. A queue carries them over, one entry for each batch."""

    def __init__(self, handler: RequestHandler, loaded: Ready, progress: BatchProgress, buffer: FrameBuffer) -> None:
        """`loaded` describes the model, which the handler has loaded."""
        self._handler = handler
        self._ready = loaded
        self._progress = progress
        self._buffer = buffer
        self._queue: SimpleQueue[Sequence[_Call] | _ControlCall | None] = SimpleQueue()
        self._forming: list[_Call] = []
        # What the handler has not begun. Both threads take requests out of it, and a pop is atomic. The thread that
        # gets a request answers it: the link's as cancelled or recalled, the handler's with what the handler returns.
        self._waiting: dict[int, ResponseWriter] = {}
        self._running: Sequence[_Call] = ()
        self._pid = os.getpid()
        handler.is_cancelled = self._is_cancelled

    # --- the link's thread ---

    def submit(self, submit: Submit, writer: ResponseWriter) -> None:
        writer.has_begun = False
        self._waiting[submit.id] = writer
        self._forming.append(_Call(submit.input, writer))
        if not submit.more:
            batch, self._forming = self._forming, []
            self._queue.put(batch)

    def drop(self, writer: ResponseWriter, unless_begun: bool) -> None:
        if self._waiting.pop(writer.id, None) is not None:
            writer.is_recalled = unless_begun
            writer.drop()
        elif not unless_begun:
            writer.is_cancelled = True  # a stream looks at it before its next piece

    async def control(self, command: Command) -> bytes:
        call = _ControlCall(command, Future())
        # The handler executes the command whether or not somebody still waits for it. A waiter that gives up must not
        # cancel the future: setting its result would then raise in the handler's thread.
        call.answer.set_running_or_notify_cancel()
        self._queue.put(call)
        return (await asyncio.wrap_future(call.answer)).encode()

    def stop(self) -> None:
        """Have `run` return soon."""
        self._waiting.clear()
        self._queue.put(None)

    # --- the handler's thread ---

    def run(self, on_ready: Callable[[Ready], None]) -> None:
        """Call `on_ready`, then run batches until `stop`. Raises EXITS if the handler ends the process."""
        model_imports.finish_loading()
        on_ready(self._ready)
        while (entry := self._queue.get()) is not None:
            if isinstance(entry, _ControlCall):
                self._run_command(entry)
            else:
                self._run_batch(entry)

    def _run_batch(self, batch: Sequence[_Call]) -> None:
        self._running = begun = [call for call in batch if self._waiting.pop(call.writer.id, None) is not None]
        for call in begun:
            call.writer.has_begun = True
        # On the shared page, which outlives this process: if it dies now, the front end fails this batch and gives the
        # others to another worker.
        self._progress.begin(time.monotonic())
        try:
            if begun:
                self._answer(begun)
        except EXITS as error:
            self._end_fork()
            for call in begun:
                if not call.writer.ended:
                    call.writer.fail(WorkerDiedError(exit_message(error)))
            raise
        self._progress.end(time.monotonic())

    def _is_cancelled(self, request: Input) -> bool:
        return any(call.writer.is_cancelled for call in self._running if call.request is request)

    def _run_command(self, call: _ControlCall) -> None:
        try:
            answer = self._call_handler(call.command)
        except EXITS as error:
            self._end_fork()
            call.answer.set_exception(WorkerDiedError(exit_message(error)))
            raise
        except BaseException as error:  # noqa: BLE001 - the border to handlers, which raise anything; the command fails
            self._end_fork()
            call.answer.set_exception(_failure(error))
        else:
            self._end_fork()
            call.answer.set_result(answer)

    def _call_handler(self, command: Command) -> str:
        match command:
            case AddAdapter(adapter):
                return self._handler.add_adapter(adapter)
            case RemoveAdapter(name):
                return self._handler.remove_adapter(name)
        raise unsupported_error(command)

    def _answer(self, batch: Sequence[_Call]) -> None:
        """Answer every call of `batch`, whatever the handler does."""
        outcomes = self._outcomes(batch)
        self._end_fork()
        streams = []
        for call, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, LmiServerError):
                call.writer.fail(outcome)
            elif outcome.stream is not None:
                assert isinstance(outcome.stream, Iterator), "an asynchronous stream is for an AsyncRequestHandler"
                streams.append(_Stream(call, outcome, outcome.stream))
            else:
                call.writer.reply(outcome.status, outcome.headers, outcome.data, outcome.reason, outcome.error)
                call_after(outcome)
        while streams:  # a piece of each in turn, so that all streams of the batch move
            streams = [stream for stream in streams if stream.is_held or stream.advance()]
            self._end_fork()
            while streams and (self._buffer.is_full or all(stream.is_held for stream in streams)):
                time.sleep(_FULL_PAUSE_S)

    def _outcomes(self, batch: Sequence[_Call]) -> Sequence[Response | LmiServerError]:
        try:
            outcomes = translation.outcomes(self._handler, [call.request for call in batch])
        except EXITS:
            raise
        except BaseException as error:  # noqa: BLE001 - the border to handlers, which raise anything; the requests end
            return [_failure(error)] * len(batch)
        if len(outcomes) != len(batch):
            return [HandlerError(f"the handler answered {len(outcomes)} of {len(batch)} requests")] * len(batch)
        return outcomes

    def _end_fork(self) -> None:
        """End this process if the handler forked it and then returned: its parent gives the answer."""
        if os.getpid() != self._pid:
            os._exit(0)


class _Stream:
    """An answer that leaves piece by piece. An error before the first of them has a status of its own."""

    def __init__(self, call: _Call, response: Response, pieces: Iterator[bytes]) -> None:
        self._writer = call.writer
        self._response = response
        self._pieces = pieces
        self._writer.open(response.status, response.headers, reason=response.reason)

    @property
    def is_held(self) -> bool:
        return self._writer.is_held and not self._writer.is_cancelled

    def advance(self) -> bool:
        """Send the next piece; return False at the end."""
        if self._writer.is_cancelled:
            self._close()
            self._writer.drop()
            return False
        try:
            piece = next(self._pieces)
        except StopIteration:
            self._writer.end()
        except EXITS:
            raise
        except BaseException as error:  # noqa: BLE001 - the border to handlers, which raise anything; the stream ends
            self._writer.fail(_failure(error))
        else:
            if piece:
                self._writer.chunk(piece)
                self._writer.buffer.count(len(piece))
            return True
        call_after(self._response)
        return False

    def _close(self) -> None:
        close = getattr(self._pieces, "close", None)
        try:
            if close is not None:
                close()
        except EXITS:
            raise
        except BaseException:  # the border to handlers: its client is gone
            logger.exception("the stream of a client that is gone raised while it was closed")
        call_after(self._response)


def _failure(error: BaseException) -> LmiServerError:
    if isinstance(error, LmiServerError):
        return error
    logger.error("the handler raised", exc_info=error)
    return failure_of(error)
