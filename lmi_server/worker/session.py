"""One model on one link: the life of a worker process from Load to Shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Coroutine
from typing import Any, cast

from lmi_server.configuration.handlers import load as load_class
from lmi_server.configuration.resolve import rebuild_options
from lmi_server.dialects.base import ServedModel
from lmi_server.errors import LmiServerError, ModelLoadError, ModelMemoryError, RequestError
from lmi_server.handler import LLMHandler, ModelInfo
from lmi_server.job import CANCELLED
from lmi_server.link import FrontendLink
from lmi_server.protocol import Cancel, Control, Failed, Load, Ready, Shutdown, Stats, Submit, ToWorker
from lmi_server.worker.outbox import Answer, Outbox
from lmi_server.worker.serve import Engine, serve

logger = logging.getLogger(__name__)

_STATS_INTERVAL_S = 1.0
# What engines raise for want of memory, beside MemoryError: CUDA's own, torch's by class name, vLLM's, and what torch
# says when the host has none left.
_OUT_OF_MEMORY_CLASS = "OutOfMemoryError"
_OUT_OF_MEMORY_TEXTS = (
    "CUDA error: out of memory",
    "No available memory for the cache blocks",
    "can't allocate memory",
    "Cannot allocate memory",
)


class LoadedModel:
    """A handler that has started, and what the dialects may know of its model."""

    def __init__(self, engine: Engine, served: ServedModel, info: ModelInfo) -> None:
        self.engine = engine
        self.served = served
        self.info = info


async def load_model(load: Load) -> LoadedModel:
    """Import the handler, rebuild its options and start it. Raises whatever the handler raises."""
    options = rebuild_options(load.handler, load.options)
    handler = cast("type[LLMHandler]", load_class(load.handler))()
    info = await handler.start(load.model_dir, options)
    served = ServedModel(
        name=load.model_name,
        served_names=tuple(load.served_names),
        output_formatter=options.output_formatter,
        tgi_compat=options.tgi_compat,
    )
    return LoadedModel(Engine(handler, options.max_rolling_batch_size), served, info)


def load_failure(error: Exception) -> LmiServerError:
    """Return what the front end is told of an exception that ended a load."""
    message = error.message if isinstance(error, LmiServerError) else f"{type(error).__name__}: {error}"
    if _is_out_of_memory(error):
        return ModelMemoryError(message)
    return error if isinstance(error, LmiServerError) else ModelLoadError(message)


def _is_out_of_memory(error: BaseException | None) -> bool:
    if error is None:
        return False
    if isinstance(error, MemoryError) or type(error).__name__ == _OUT_OF_MEMORY_CLASS:
        return True
    return any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS) or _is_out_of_memory(error.__cause__)


class Session:
    """Does what the front end's messages say.

    Once it is `ending` it closes the link; `exit_code` is that of the process.
    """

    def __init__(self) -> None:
        self.ending = False
        self.exit_code = 0
        self._link: FrontendLink | None = None
        self._outbox: Outbox | None = None
        self._model: LoadedModel | None = None
        self._loading: asyncio.Task[None] | None = None
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, Answer] = {}  # those of _requests
        self._background: set[asyncio.Task[None]] = set()
        self._stopping = False

    def attach(self, link: FrontendLink) -> None:
        """Answer over `link` from now on, and show once a second that this process lives."""
        self._link = link
        self._outbox = Outbox(link)
        self._run(self._send_stats())

    def on_message(self, message: ToWorker) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Cancel():
                self._cancel(message.id)
            case Load():
                logging.getLogger().setLevel(message.log_level)
                self._loading = self._run(self._load(message))
            case Control():
                self._refuse(message)
            case Shutdown(deadline_s):
                self.shut_down(deadline_s)

    def shut_down(self, deadline_s: float) -> None:
        """Finish what runs within `deadline_s` seconds, stop the handler, end. Called again it changes nothing."""
        if not self._stopping:
            self._stopping = True
            self._run(self._shut_down(deadline_s))

    # --- the model ---

    async def _load(self, load: Load) -> None:
        assert self._link is not None
        try:
            self._model = await load_model(load)
        except LmiServerError as error:
            self._fail(load_failure(error))
        except Exception as error:  # the border to handlers and engines, which raise anything; the load fails with it
            logger.exception("model %s: the handler raised while it loaded", load.model_name)
            self._fail(load_failure(error))
        else:
            gc.collect()
            gc.freeze()  # what is loaded stays; without it every full collection would walk the engine's objects
            info = self._model.info
            self._link.send(Ready(info.max_model_len, dict(info.details)))
            self._link.send(Stats(self._gauges()))

    def _fail(self, error: LmiServerError) -> None:
        assert self._link is not None
        self._link.send(Failed(error.kind, error.message))
        self._end(exit_code=1)

    async def _shut_down(self, deadline_s: float) -> None:
        assert self._outbox is not None
        if self._requests:
            await asyncio.wait(self._requests.values(), timeout=deadline_s)
        self._outbox.close()  # the front end sees the link end and decides about the rest: retry or fail
        for task in self._requests.values():
            task.cancel()
        if self._requests:
            await asyncio.wait(self._requests.values())
        if self._loading is not None:
            self._loading.cancel()
        if self._model is not None:
            await self._model.engine.handler.stop()
        self._end(exit_code=0)

    def _end(self, exit_code: int) -> None:
        assert self._link is not None
        assert self._outbox is not None
        self._outbox.flush()
        self.exit_code = exit_code
        self.ending = True
        self._link.close()

    async def _send_stats(self) -> None:
        assert self._link is not None
        while True:
            self._link.send(Stats(self._gauges(), self._progressed()))
            await asyncio.sleep(_STATS_INTERVAL_S)

    def _progressed(self) -> list[int]:
        moved = [answer for answer in self._answers.values() if answer.progressed]
        for answer in moved:
            answer.progressed = False
        return [answer.id for answer in moved]

    def _gauges(self) -> dict[str, float]:
        if self._model is None:
            return {}
        try:
            return dict(self._model.engine.handler.stats())
        except Exception:  # the border to handlers: gauges that cannot be read must not end the model
            logger.exception("the handler raised in stats()")
            return {}

    # --- requests ---

    def _submit(self, submit: Submit) -> None:
        assert self._model is not None, "the front end submits only once we are ready"
        assert self._outbox is not None
        if self._stopping:
            return  # the end of the link tells the front end to give it to another worker
        answer = Answer(self._outbox, submit.id)
        task = asyncio.create_task(serve(submit.input, self._model.engine, self._model.served, answer, self._outbox))
        self._requests[submit.id] = task
        self._answers[submit.id] = answer
        task.add_done_callback(lambda _: self._answered(answer))

    def _answered(self, answer: Answer) -> None:
        del self._requests[answer.id]
        del self._answers[answer.id]
        if not answer.ended:  # cancelled before its first step, so that `serve` never ran
            answer.error(CANCELLED, "cancelled by the front end")

    def _cancel(self, request_id: int) -> None:
        task = self._requests.get(request_id)  # none where the answer's end and the Cancel crossed on the link
        if task is not None:
            task.cancel()

    def _refuse(self, control: Control) -> None:
        assert self._outbox is not None
        error = RequestError(f"operation {control.operation!r} is not known to this worker")
        Answer(self._outbox, control.id).error(error.kind, error.message)

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that the session keeps alive; the process ends with an error where it raises."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("the worker cannot go on", exc_info=task.exception())
            self._end(exit_code=1)
