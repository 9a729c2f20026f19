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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from types import FrameType

from lmi_server.batch_progress import BatchProgress
from lmi_server.dialects.errors import error_reply
from lmi_server.errors import HandlerError, LmiServerError, ModelLoadError, ModelMemoryError, WorkerDiedError
from lmi_server.handler import RequestHandler, Response
from lmi_server.link import FrontendLink
from lmi_server.protocol import Chunk, End, Error, Frames, Head, Input, Item, Ready, Reply, Submit
from lmi_server.worker.loading import Loading, is_out_of_memory
from lmi_server.worker.service import Service, cancelled, recalled

logger = logging.getLogger(__name__)

_UNSENT_LIMIT = 1 << 20  # bytes of streams that the main thread may be ahead of the link
_FULL_PAUSE_S = 0.001
_STOP_S = 5.0  # for RequestHandler.stop
_FAILURES = (Exception, asyncio.CancelledError)  # what a handler may raise and be asked again
_EXITS = (SystemExit, KeyboardInterrupt)


class Call:
    """One request. `cancelled` is set by the link's thread, the rest by the main thread."""

    __slots__ = ("cancelled", "ended", "id", "request", "started")

    def __init__(self, call_id: int, request: Input) -> None:
        self.id = call_id
        self.request = request
        self.cancelled = False
        self.started = False  # the head of its stream is out
        self.ended = False


class Outgoing:
    """What the main thread hands to the link's thread; all but `leave` is for the main thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_items: Callable[[list[Item]], None],
        is_congested: Callable[[], bool],
    ) -> None:
        self.loop = loop
        self._on_items = on_items
        self._is_congested = is_congested
        self._items: deque[Item] = deque()
        self._leaving = False  # `leave` is on its way to the loop
        self._put = 0  # bytes of chunks, ever; one thread writes each of the two
        self._left = 0

    def put(self, item: Item) -> None:
        """Send `item`, together with what else is put before the link's thread has its turn."""
        self._items.append(item)
        if not self._leaving:
            self._leaving = True
            self.loop.call_soon_threadsafe(self.leave)

    def put_chunk(self, call_id: int, data: bytes) -> None:
        self._put += len(data)
        self.put(Chunk(call_id, data))

    def end(self, call: Call, item: Reply | End | Error) -> None:
        """Send the last item of `call`."""
        call.ended = True
        self.put(item)

    def fail(self, call: Call, error: LmiServerError) -> None:
        """End `call` with an error, in the form that what was sent before asks for."""
        if call.started:
            self.end(call, Error(call.id, error.kind, error.message))
        else:
            self.end(call, Reply(call.id, *error_reply(call.request.route, error)))

    def is_full(self) -> bool:
        """Tell whether the front end reads more slowly than a stream produces."""
        return self._put - self._left > _UNSENT_LIMIT or self._is_congested()

    def leave(self) -> None:
        """Give what was put to the link. Runs in the link's thread."""
        self._leaving = False
        items = list(_joined(self._taken()))
        if items:
            self._on_items(items)

    def _taken(self) -> Iterator[Item]:
        take = self._items.popleft
        while self._items:
            item = take()
            if isinstance(item, Chunk):
                self._left += len(item.data)
            yield item


def _joined(items: Iterable[Item]) -> Iterator[Item]:
    """Yield `items`, chunks of one answer that follow each other as one."""
    chunks: list[bytes] = []
    call_id = 0
    for item in items:
        if isinstance(item, Chunk):
            if chunks and item.id != call_id:
                yield Chunk(call_id, b"".join(chunks))
                chunks = []
            call_id = item.id
            chunks.append(item.data)
            continue
        if chunks:
            yield Chunk(call_id, b"".join(chunks))
            chunks = []
        yield item
    if chunks:
        yield Chunk(call_id, b"".join(chunks))


class MainThread:
    """Runs the handler's code. `run` returns once `stop` was called, or the handler has ended the process."""

    def __init__(self, handler: RequestHandler, loading: Loading, progress: BatchProgress) -> None:
        self.outgoing: Outgoing
        self.waiting: dict[int, Call] = {}  # not begun; whoever takes a call out of it has it
        self.on_exit: Callable[[int], None]
        self._exit_code = 0
        self._handler = handler
        self._loading = loading
        self._progress = progress
        self._inbox: SimpleQueue[Sequence[Call] | None] = SimpleQueue()
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

    def stop(self) -> Future[None]:
        """Have `run` end after what was delivered; return what is done once it has."""
        self._inbox.put(None)
        self._start.set()
        return self._ended

    def stack(self) -> str:
        """Return where the main thread is, the innermost call last."""
        frame: FrameType | None = sys._current_frames().get(self._ident)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    # --- the main thread ---

    def run(self) -> int:
        """Load the model, answer what is delivered, stop the handler; return the exit code of the process."""
        self._start.wait()
        try:
            if self._load():
                self._serve()
                self._handler.stop()
        finally:
            self._ended.set_result(None)
        return self._exit_code

    def _load(self) -> bool:
        try:
            info = self._handler.start(self._loading.model_dir, self._loading.options)
        except Exception as error:  # noqa: BLE001 - the border to handlers, which raise anything; the load fails with it
            self._loaded.set_exception(error)
            return False
        except _EXITS as error:
            self._loaded.set_exception(ModelLoadError(_ended_by(error)))
            return False
        gc.collect()
        gc.freeze()  # what is loaded stays; without it every full collection would walk it
        batch_size = self._loading.load.batch_size
        self._loaded.set_result(Ready(info.max_model_len, dict(info.details), batch_size))
        return True

    def _serve(self) -> None:
        take = self._inbox.get
        begin = self.waiting.pop
        while (batch := take()) is not None:
            begun = [call for call in batch if begin(call.id, None) is not None]
            self._progress.begin(time.monotonic())
            if begun:
                try:
                    self._answer(begun)
                except _EXITS as error:
                    self._exit(begun, error)
                    return
            self._progress.end(time.monotonic())

    def _answer(self, batch: Sequence[Call]) -> None:
        """Answer every call of `batch`, whatever the handler does."""
        outcomes = self._outcomes(batch)
        self._end_fork()
        streams = []
        for call, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, LmiServerError):
                self.outgoing.fail(call, outcome)
            elif outcome.stream is not None:
                streams.append(_Stream(call, outcome, outcome.stream, self.outgoing))
            else:
                self.outgoing.end(call, Reply(call.id, outcome.status, outcome.headers, outcome.data))
                _finish(outcome)
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
        self._exit_code = 1
        self.outgoing.loop.call_soon_threadsafe(self.on_exit, 1)


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
        _finish(self._response)
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
        _finish(self._response)


def _finish(response: Response) -> None:
    if response.after is None:
        return
    try:
        response.after()
    except Exception:  # the border to handlers: the answer is on its way
        logger.exception("what the handler does after its answer raised")


def _failure(error: BaseException) -> LmiServerError:
    if isinstance(error, LmiServerError):
        return error
    logger.error("the handler raised", exc_info=error)
    message = f"{type(error).__name__}: {error}"
    return ModelMemoryError(message) if is_out_of_memory(error) else HandlerError(message)


def _ended_by(error: BaseException) -> str:
    return f"The handler ended its process: {type(error).__name__}({error})"


class InMainThread(Service):
    """Serves batches one after the other in the main thread; the link's side of it."""

    def __init__(self, main: MainThread, link: FrontendLink, on_exit: Callable[[int], None]) -> None:
        self._main = main
        self._link = link
        self._calls: dict[int, Call] = {}
        self._forming: list[Call] = []
        self._closed = False
        self._idle = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._outgoing = main.outgoing = Outgoing(loop, self._on_items, lambda: link.congested)
        main.on_exit = on_exit

    async def load(self) -> Ready:
        return await self._main.load()

    def submit(self, submit: Submit) -> None:
        call = self._calls[submit.id] = Call(submit.id, submit.input)
        self._forming.append(call)
        if not submit.more:
            batch, self._forming = self._forming, []
            self._main.deliver(batch)

    def cancel(self, request_id: int) -> None:
        call = self._calls.get(request_id)
        if call is None:
            return
        call.cancelled = True
        if self._main.waiting.pop(request_id, None) is not None:
            self._on_items([cancelled(request_id)])

    def recall(self, request_id: int) -> None:
        if self._main.waiting.pop(request_id, None) is not None:
            self._on_items([recalled(request_id)])

    async def finish(self, deadline_s: float) -> None:
        if not self._calls:
            return
        self._idle.clear()
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            logger.error("the handler is still at it after %g seconds:\n%s", deadline_s, self._main.stack())

    async def stop(self) -> None:
        self._outgoing.leave()
        self._closed = True
        self._main.waiting.clear()
        ended = self._main.stop()
        await asyncio.wait([asyncio.wrap_future(ended)], timeout=_STOP_S)

    def gauges(self) -> Mapping[str, float]:
        return {"running_requests": len(self._calls)}

    def _on_items(self, items: list[Item]) -> None:
        if self._closed:
            return
        calls = self._calls
        for item in items:
            if isinstance(item, Reply | End | Error):
                calls.pop(item.id, None)
        self._link.send(Frames(items))
        self._link.flush()
        if not calls:
            self._idle.set()
