"""Takes requests for speech recognition concurrently, and gives each sound its turn.

handle ──> a reading thread      decodes the sounds
       ──> the computing thread  one step after the other: the sound that has waited longest, and others that share
                                 the step with it
       <── the result, or the text as it grows
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from handlers.abandoned_work import to_its_end
from handlers.request_groups import device_failure, pipeline_failure
from handlers.tasks.speech.recognition import SpeechRecognition
from handlers.tasks.speech.transcription import GrowingText, Transcription
from handlers.tasks.task_handler import TaskHandler, TaskRequest
from lmi_server.contract.errors import EXITS, LmiServerError
from lmi_server.contract.handler import AsyncRequestHandler, Response
from lmi_server.contract.protocol import Input

_READERS = 4  # sounds that are decoded at once
_MAX_ROWS = 8  # sequences of one step: each holds a cache as long as a window

_Result = TypeVar("_Result")


class SpeechService(AsyncRequestHandler):
    """Serves the requests that `tasks` reads."""

    reads_tensors = False

    def __init__(self, tasks: TaskHandler, recognition: SpeechRecognition) -> None:
        self._tasks = tasks
        self._recognition = recognition
        # One thread computes: see handlers/tasks/generation/task.py for what more of them cost.
        self._computing = ThreadPoolExecutor(1, "transcribe")
        self._reading = ThreadPoolExecutor(_READERS, "decode")
        self._readers = asyncio.Semaphore(_READERS)  # further requests wait here, where they can leave
        self._waiting: list[_SoundTask] = []
        self._running: asyncio.Task[None] | None = None

    async def handle(self, request: Input) -> Response:
        async with self._readers:
            call = await to_its_end(self._in_thread(self._reading, lambda: self._tasks.read(request)))
        if call.framing is not None:
            return Response(headers=[("content-type", call.framing.content_type)], stream=self._stream(request, call))
        results: list[dict[str, object]] = []
        for first in range(0, len(call.inputs), _MAX_ROWS):  # so that no request has more turns than that in a round
            results += await self._results(request, call, call.inputs[first : first + _MAX_ROWS])
        return call.write(results)

    async def _results(self, request: Input, call: TaskRequest, inputs: Sequence[object]) -> list[dict[str, object]]:
        turns: list[_SoundTask] = []
        try:
            turns += (self._queue(request, call, samples) for samples in inputs)
            return [await one.done for one in turns]
        finally:
            for one in turns:
                one.cancel()

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
        for pool in (self._computing, self._reading):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _stream(self, request: Input, call: TaskRequest) -> AsyncGenerator[bytes]:
        assert call.framing is not None, "the request asks for a stream"
        (samples,) = call.inputs
        turns = self._queue(request, call, samples)
        text, loop = GrowingText(), asyncio.get_running_loop()

        def on_text(so_far: str) -> None:
            text.so_far = so_far
            loop.call_soon_threadsafe(turns.news.set)

        turns.transcription.on_text = on_text
        turns.done.add_done_callback(lambda _: turns.news.set())
        try:
            while not turns.done.done():
                await turns.news.wait()
                turns.news.clear()
                yield _frame(call, text.take())
            text.so_far = str(turns.done.result()["text"])
            yield _frame(call, text.take())
        finally:
            turns.cancel()

    # --- turns ---

    def _queue(self, request: Input, call: TaskRequest, samples: object) -> _SoundTask:
        try:
            transcription = self._recognition.begin(samples, call.parameters)
        except Exception as error:  # the border to the library, which checks some arguments here
            raise pipeline_failure(error) from error
        turns = _SoundTask(request, transcription)
        self._waiting.append(turns)
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return turns

    async def _run(self) -> None:
        """Do step after step until nothing waits."""
        try:
            while together := self._next():
                await self._step(together)
                self._waiting += [turns for turns in together if not turns.ended]
        finally:
            self._running = None

    def _next(self) -> list[_SoundTask]:
        """Take the sound that has waited longest out of the queue, and all others of its step."""
        self._waiting = [turns for turns in self._waiting if not turns.ended]
        if not self._waiting:
            return []
        first = self._waiting[0].transcription
        alike = [turns for turns in self._waiting if first.key is not None and turns.transcription.key == first.key]
        together = alike[: max(1, _MAX_ROWS // first.rows)] or self._waiting[:1]
        self._waiting = [turns for turns in self._waiting if turns not in together]
        return together

    async def _step(self, together: Sequence[_SoundTask]) -> None:
        failure = await self._in_thread(self._computing, lambda: self._advance(together))
        for turns in (*together, *self._waiting):  # the time of a sound does not run while it waits for its turn
            self.note_progress(turns.request)
            turns.news.set()
        if isinstance(failure, LmiServerError) and len(together) > 1:  # so that only those fail that cannot be served
            for turns in together:
                if turns.transcription.result is None:
                    await self._step([turns])
                else:
                    turns.finish(None)
            return
        for turns in together:
            turns.finish(failure)

    def _advance(self, together: Sequence[_SoundTask]) -> BaseException | None:
        """Do a step; return what failed. Runs in the thread that computes."""
        try:
            self._recognition.advance([turns.transcription for turns in together])
            return None
        except EXITS as error:
            return error
        except BaseException as error:  # noqa: BLE001 - the border to engines (Rust's panics are no Exception)
            return device_failure(error) or pipeline_failure(error)

    async def _in_thread(self, pool: ThreadPoolExecutor, function: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(pool, function)


class _SoundTask:
    """One sound of a request, and where its result goes. `news` is set after each step of any sound."""

    def __init__(self, request: Input, transcription: Transcription) -> None:
        self.request = request
        self.transcription = transcription
        self.news = asyncio.Event()
        self.done: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()

    @property
    def ended(self) -> bool:
        return self.done.done()

    def finish(self, failure: BaseException | None) -> None:
        """Hand out the result, if there is one, or the failure."""
        if self.ended:
            return
        if failure is not None:
            self.done.set_exception(failure)
        elif self.transcription.result is not None:
            self.done.set_result(self.transcription.result)

    def cancel(self) -> None:
        """Have no further step, unless the result is there."""
        self.transcription.cancelled = True
        if not self.done.cancel() and not self.done.cancelled():
            self.done.exception()  # which nothing else may look at


def _frame(call: TaskRequest, text: str) -> bytes:
    """Return what a text becomes in a stream; nothing of an empty one, though it shows progress."""
    assert call.framing is not None, "only a stream has frames"
    return call.framing.frame({"outputs": [text]}) if text else b""
