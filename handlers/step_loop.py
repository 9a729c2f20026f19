"""Drives an engine that lives in the worker's process: a thread of its own steps it, the event loop gets the deltas.

The two sides share two queues. Commands (add, abort, call) go to the engine's thread, which applies all of them between
two steps: an engine never sees a change while it computes. Outputs collect in a list during a step and cross to the
event loop with one call for all requests together, because each wake-up of the loop from another thread costs a system
call and a switch of the interpreter lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Generic, Protocol, TypeVar

from lmi_server.contract.errors import HandlerError, LmiServerError, ModelNotReadyError, describe, failure_of
from lmi_server.contract.generation import Delta
from lmi_server.contract.handler import DeltaReceiver

logger = logging.getLogger(__name__)

Output = Delta | LmiServerError

AddRequest = Callable[[Callable[[Output], None]], int]
"""Gives a request to an engine, in the engine's thread; its argument gets the outputs.

It returns the number that the engine gave the request. Only engines number requests: clients choose their own ids, and
two may choose the same one.
"""


class EngineLostError(BaseException):
    """The engine cannot go on, whatever it was asked for: the process ends, and the front end starts another worker.

    Every other exception ends the requests that it concerns. This one is a BaseException so that no `except Exception`
    on its way takes it for such an error.
    """


class SteppedEngine(Protocol):
    """What a step loop needs of an engine; it calls all of these in its own thread."""

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something."""
        ...

    def step(self) -> None:
        """Compute one step and pass the deltas to the `emit` of their requests."""
        ...

    def abort(self, number: int) -> None:
        """Free the place of the request that got this number when it was added; ignore requests that have ended."""
        ...

    def fail_running(self, error: BaseException) -> None:
        """End, with an error, the requests that the failed step may have touched."""
        ...


E = TypeVar("E", bound=SteppedEngine)
T = TypeVar("T")


class StepLoop(Generic[E]):
    """Runs an engine in a thread. Commands are applied between steps, deltas reach the event loop once per step.

    The same thread builds the engine, because OpenMP keeps a team of threads for every thread that ever ran a parallel
    operation. With more threads in all teams than cores, libgomp's threads stop spinning between operations and go to
    sleep, which doubles the time of a small step.
    """

    def __init__(self, build: Callable[[], E], gather_s: float = 0.0) -> None:
        """`gather_s`: an idle engine begins once no command has come for so many seconds, or after three times that.

        Requests that are sent together arrive one by one. If the first of them started a step at once, the others
        would wait until that step ends.
        """
        self.engine: E
        self._build = build
        self._gather_s = gather_s
        self._loop = asyncio.get_running_loop()
        self._built: asyncio.Future[None] = self._loop.create_future()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._outbox: list[tuple[_Inbox, Output]] = []
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    async def start(self) -> E:
        """Build the engine and return it. Raises what `build` raises."""
        self._thread.start()
        await self._built
        return self.engine

    async def stop(self) -> None:
        """End the thread after the step that it is in."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    async def generate(self, prepare: Callable[[], Awaitable[AddRequest]]) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one request. `prepare` runs on the event loop first, to tokenize the prompt for example.

        Closing the generator aborts the request before the next step. Raises the errors of `prepare`, or the one with
        which the engine ends the request.
        """
        with self._request(await prepare()) as inbox:
            while not inbox.has_delivered:
                for output in await inbox.take():
                    if isinstance(output, LmiServerError):
                        raise output
                    yield output

    async def deliver(self, prepare: Callable[[], Awaitable[AddRequest]], receiver: DeltaReceiver) -> None:
        """Give `receiver` the deltas of one request; otherwise as `generate`.

        The receiver gets a delta when it reaches the event loop. The task of the request runs only if it has to wait.
        """
        with self._request(await prepare(), receiver) as inbox:
            while not inbox.has_delivered:
                outputs = await inbox.take()
                if not outputs and not inbox.has_delivered:
                    await receiver.ready()
                for output in outputs:
                    if isinstance(output, LmiServerError):
                        raise output
                    if not receiver.take(output):
                        await receiver.ready()

    @contextlib.contextmanager
    def _request(self, add: AddRequest, receiver: DeltaReceiver | None = None) -> Iterator[_Inbox]:
        """Add a request to the engine; abort it if what is inside ends before the engine has ended it."""
        if self._stopping:  # after `prepare`, during which the loop may have been stopped
            raise ModelNotReadyError("the model is shutting down")
        inbox = _Inbox(receiver)
        self._command(functools.partial(self._add, inbox, add))
        del add  # else the traceback of an aborted request would hold what it was given, such as images
        try:
            yield inbox
        finally:
            inbox.receiver = None
            if not inbox.ended:
                self._command(lambda: self._abort(inbox))

    def on_loop(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Return a function that the engine's thread may call to have `callback` called on the event loop."""

        def call() -> None:
            self._loop.call_soon_threadsafe(callback)

        return call

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the engine's thread, between two steps; return its result, or raise its exception."""
        if self._stopping:
            raise ModelNotReadyError("the model is shutting down")
        done: asyncio.Future[T] = self._loop.create_future()
        self._command(functools.partial(self._call, done, function))
        try:
            return await done
        finally:
            del done  # the traceback of its error has this frame: they would hold each other, and what `function` has

    def _call(self, done: asyncio.Future[T], function: Callable[[], T]) -> None:
        try:
            settle = functools.partial(_set_result, done, function())
        # The border to the engine: `await call(...)` raises its error.
        except Exception as error:  # noqa: BLE001
            settle = functools.partial(_set_exception, done, error)
        except EngineLostError:
            raise
        # Any other exception, such as a panic of a library in Rust, would end the event loop.
        except BaseException as error:  # noqa: BLE001
            settle = functools.partial(_set_exception, done, HandlerError(describe(error)))
        self._loop.call_soon_threadsafe(settle)
        del done, settle  # the traceback of an error has this frame, too

    def _add(self, inbox: _Inbox, add: AddRequest) -> None:
        def emit(output: Output) -> None:
            self._outbox.append((inbox, output))

        try:
            inbox.number = add(emit)
        except LmiServerError as error:
            emit(error)
        except EngineLostError:
            raise
        # The border to the engine: a request that it cannot take ends alone; the thread goes on.
        except BaseException as error:
            logger.exception("the engine cannot take a request")
            emit(failure_of(error))

    def _abort(self, inbox: _Inbox) -> None:
        if inbox.number is not None:  # commands are applied in order: without a number the engine has refused it
            self.engine.abort(inbox.number)

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        # The border to the code that builds the engine: `start` raises its error.
        try:
            self.engine = self._build()
        except BaseException as error:  # noqa: BLE001
            self._loop.call_soon_threadsafe(self._end_build, error)
            return
        self._loop.call_soon_threadsafe(self._end_build, None)
        try:
            self._run_steps()
        except BaseException:
            # Without its thread the engine is dead. The front end notices the end of the process at once, and starts
            # another worker, while a process without its engine would keep requests waiting.
            logger.critical("the step loop failed", exc_info=True)
            logging.shutdown()
            os._exit(1)

    def _end_build(self, error: BaseException | None) -> None:
        if self._built.done():  # cancelled: the worker is shutting down while it loads
            return
        if error is None:
            self._built.set_result(None)
        else:
            self._built.set_exception(error)

    def _run_steps(self) -> None:
        while self._wait_for_work():
            while self._commands:
                self._commands.popleft()()
            if self.engine.has_work:
                self._step()
            if self._outbox:
                outputs, self._outbox = self._outbox, []
                self._loop.call_soon_threadsafe(_deliver, outputs)

    def _wait_for_work(self) -> bool:
        if self.engine.has_work and not self._stopping:
            return True
        with self._wake:
            self._wake.wait_for(lambda: self._commands or self._stopping or self.engine.has_work)
            latest = time.monotonic() + 3 * self._gather_s
            count = 0
            while count < len(self._commands) and not self._stopping and time.monotonic() < latest:
                count = len(self._commands)
                self._wake.wait(min(self._gather_s, latest - time.monotonic()))
        return not self._stopping

    def _step(self) -> None:
        try:
            self.engine.step()
        except EngineLostError:
            raise
        # The border to the engine: an error ends the requests of this step; the thread goes on.
        except BaseException as error:
            logger.exception("a step failed")
            self.engine.fail_running(error)


class _Inbox:
    """Outputs of one request on their way to its task. Only the event loop uses them.

    With a `receiver` they pass the task by, unless that is busy or the receiver has to be waited for. `number` is the
    engine's number of the request, None if the engine does not have it. Only its thread uses it.
    """

    number: int | None = None

    def __init__(self, receiver: DeltaReceiver | None = None) -> None:
        self.receiver = receiver
        self.ended = False
        self._error: BaseException | None = None  # of the receiver
        self._is_paused = False  # the receiver has to be waited for
        self._outputs: list[Output] = []
        self._waiter: asyncio.Future[None] | None = None  # of the task, while it waits for outputs

    @property
    def has_delivered(self) -> bool:
        """Whether the last output has left."""
        return self.ended and not self._outputs

    def put(self, output: Output) -> None:
        self.ended = isinstance(output, LmiServerError) or output.finish_reason is not None
        waiter = self._waiter
        waits = waiter is not None and not waiter.done()
        if waits and self.receiver is not None and not isinstance(output, LmiServerError):
            self._pass(output, self.receiver)
            return
        self._outputs.append(output)
        if waits:
            self._wake()

    def _pass(self, delta: Delta, receiver: DeltaReceiver) -> None:
        """Give the receiver a delta while the task waits; the task goes on at the end, or to wait for the receiver."""
        try:
            goes_on = receiver.take(delta)
        # The border to formats, which may be code of users: the task raises it, as if it had called the code.
        except BaseException as error:  # noqa: BLE001
            self._error = error
            goes_on = False
        self._is_paused = not goes_on
        if self.ended or not goes_on:
            self._wake()

    def _wake(self) -> None:
        assert self._waiter is not None, "the task waits"
        self._waiter.set_result(None)

    async def take(self) -> list[Output]:
        """Return all outputs that have arrived; wait for the first one.

        With a receiver, return none once it has taken the last one, or has to be waited for. Raises what it raised.
        """
        if not self._outputs:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            if self._error is not None:
                raise self._error
            if self._is_paused:
                self._is_paused = False
                return []
        outputs, self._outputs = self._outputs, []
        return outputs


def _set_result(done: asyncio.Future[T], result: T) -> None:
    if not done.done():  # cancelled meanwhile
        done.set_result(result)


def _set_exception(done: asyncio.Future[T], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)


def _deliver(outputs: list[tuple[_Inbox, Output]]) -> None:
    for inbox, output in outputs:
        inbox.put(output)
