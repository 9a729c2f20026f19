"""Serves requests side by side: each is a task of an event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from lmi_server.configuration.options import ModelOptions
from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.handler import AsyncRequestHandler, LLMHandler, ModelInfo
from lmi_server.contract.protocol import AddAdapter, Command, GetMetrics, Input, Ready, RemoveAdapter, Submit
from lmi_server.dialects.base import ServedModel
from lmi_server.dialects.errors import error_reply
from lmi_server.worker.formats import Formats
from lmi_server.worker.handler_loading import Loading
from lmi_server.worker.outbox import Answer, Outbox, Way
from lmi_server.worker.serve import Engine, serve, serve_response
from lmi_server.worker.service import Service, cancelled, unsupported

if TYPE_CHECKING:
    from lmi_server.worker.session_requests import SessionRequests

logger = logging.getLogger(__name__)


class Serving(ABC):
    """What answers one request, by the kind of handler."""

    @abstractmethod
    async def start(self) -> ModelInfo:
        """Load the model. Raises whatever the handler raises."""

    @abstractmethod
    async def serve(self, request: Input, answer: Answer, outbox: Outbox) -> None:
        """Answer `request`; `answer` has ended exactly once when this returns."""

    @abstractmethod
    async def stop(self) -> None:
        """Release the model."""

    async def control(self, command: Command) -> bytes:
        """Execute `command` and return the data of its Reply.

        Raises RequestError where this model does not, or whatever the handler raises.
        """
        raise unsupported(command)

    def stats(self) -> Mapping[str, float]:
        """Return the gauges of the handler."""
        return {}


class Generation(Serving):
    """Text generation: requests are parsed, and answers written, in a dialect."""

    def __init__(self, handler: LLMHandler, loading: Loading) -> None:
        self._handler = handler
        self._loading = loading
        self._engine = Engine(handler, loading.options.max_rolling_batch_size)
        self._served: ServedModel  # once it is loaded
        self._formats: Formats
        self._sessions: SessionRequests | None = None

    async def start(self) -> ModelInfo:
        options = self._loading.options
        self._formats = Formats(self._loading, self._handler.tokenizer)
        if options.enable_stateful_sessions:
            self._sessions = _session_requests(options)
        info = await self._handler.start(self._loading.model_dir, options)
        self._served = self._loading.served_model(info)
        return info

    async def serve(self, request: Input, answer: Answer, outbox: Outbox) -> None:
        sessions = self._sessions
        if sessions is not None and sessions.concerns(request) and await self._answered(request, sessions, answer):
            return
        await serve(request, self._formats.of(request), self._engine, self._served, answer, outbox)

    async def _answered(self, request: Input, sessions: SessionRequests, answer: Answer) -> bool:
        """Answer a request that is about sessions, or names one that is not there; return whether it was one."""
        try:
            response = await asyncio.to_thread(sessions.answer, request)
        except LmiServerError as error:
            answer.reply(*error_reply(request.route, error))
            return True
        if response is not None:
            answer.reply(response.status, response.headers, response.data)
        return response is not None

    async def stop(self) -> None:
        if self._sessions is not None:
            await asyncio.to_thread(self._sessions.save)
        await self._handler.stop()

    async def control(self, command: Command) -> bytes:
        match command:
            case AddAdapter(adapter):
                formatting = self._formats.of_adapter(adapter.directory)  # the code before the weights
                await self._handler.add_adapter(adapter)
                self._formats.set_adapter(adapter.name, formatting)
                self._set_adapters(self._served.adapters | {adapter.name})
            case RemoveAdapter(name):
                self._set_adapters(self._served.adapters - {name})
                self._formats.set_adapter(name, None)
                await self._handler.remove_adapter(name)
            case GetMetrics():
                return self._handler.metrics()
        return b""

    def _set_adapters(self, names: frozenset[str]) -> None:
        self._served = msgspec.structs.replace(self._served, adapters=names)

    def stats(self) -> Mapping[str, float]:
        return self._handler.stats()


def _session_requests(options: ModelOptions) -> SessionRequests:
    from lmi_server.worker.session_requests import SessionRequests  # it needs djl_python, which only workers have

    return SessionRequests(options)


class Responses(Serving):
    """Anything else: the handler itself reads the request and writes the answer."""

    def __init__(self, handler: AsyncRequestHandler, info: ModelInfo) -> None:
        self._handler = handler
        self._info = info

    async def start(self) -> ModelInfo:
        await self._handler.start()
        return self._info

    async def serve(self, request: Input, answer: Answer, outbox: Outbox) -> None:
        await serve_response(request, self._handler, answer, outbox)

    async def control(self, command: Command) -> bytes:
        match command:
            case AddAdapter(adapter):
                return (await self._handler.add_adapter(adapter)).encode()
            case RemoveAdapter(name):
                return (await self._handler.remove_adapter(name)).encode()
        raise unsupported(command)

    async def stop(self) -> None:
        await self._handler.stop()


class SideBySide(Service):
    """Serves as many requests at once as the front end sends."""

    def __init__(self, serving: Serving, way: Way) -> None:
        self._serving = serving
        self._outbox = Outbox(way)
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, Answer] = {}  # those of _requests
        self._loaded = False

    async def load(self) -> Ready:
        info = await self._serving.start()
        self._loaded = True
        gc.collect()
        gc.freeze()  # what is loaded stays; without it every full collection would walk the engine's objects
        return Ready(info.max_model_len, dict(info.details))

    def submit(self, submit: Submit) -> None:
        answer = Answer(self._outbox, submit.id)
        task = asyncio.create_task(self._serving.serve(submit.input, answer, self._outbox))
        self._requests[submit.id] = task
        self._answers[submit.id] = answer
        task.add_done_callback(lambda _: self._answered(answer))

    def _answered(self, answer: Answer) -> None:
        del self._requests[answer.id]
        del self._answers[answer.id]
        if not answer.ended:  # cancelled before its first step, so that `serve` never ran
            error = cancelled(answer.id)
            answer.error(error.kind, error.message)

    def cancel(self, request_id: int) -> None:
        task = self._requests.get(request_id)  # none where the answer's end and the Cancel crossed on the link
        if task is not None:
            task.cancel()

    async def control(self, command: Command) -> bytes:
        return await self._serving.control(command)

    def recall(self, request_id: int) -> None:
        """Keep it: every request begins when it arrives."""

    async def finish(self, deadline_s: float) -> None:
        if self._requests:
            await asyncio.wait(self._requests.values(), timeout=deadline_s)

    async def stop(self) -> None:
        self._outbox.close()  # the front end sees the link end and decides about the rest: retry or fail
        for task in self._requests.values():
            task.cancel()
        if self._requests:
            await asyncio.wait(self._requests.values())
        if self._loaded:
            await self._serving.stop()

    def gauges(self) -> Mapping[str, float]:
        if not self._loaded:
            return {}
        try:
            return dict(self._serving.stats())
        except Exception:  # the border to handlers: gauges that cannot be read must not end the model
            logger.exception("the handler raised in stats()")
            return {}

    def progressed(self) -> list[int]:
        moved = [answer for answer in list(self._answers.values()) if answer.progressed]
        for answer in moved:
            answer.progressed = False
        return [answer.id for answer in moved]
