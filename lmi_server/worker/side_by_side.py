"""Serves an LLMHandler: each request is a task of the worker's event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from lmi_server.dialects.base import ServedModel
from lmi_server.handler import LLMHandler
from lmi_server.link import FrontendLink
from lmi_server.protocol import Adapter, Ready, Submit
from lmi_server.worker.loading import Loading
from lmi_server.worker.outbox import Answer, Outbox
from lmi_server.worker.serve import Engine, serve
from lmi_server.worker.service import Service, cancelled

logger = logging.getLogger(__name__)


class SideBySide(Service):
    """Serves requests side by side, as many as the front end sends."""

    def __init__(self, handler: LLMHandler, loading: Loading, link: FrontendLink) -> None:
        self._engine = Engine(handler, loading.options.max_rolling_batch_size)
        self._loading = loading
        self._served: ServedModel  # once it is loaded
        self._outbox = Outbox(link)
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, Answer] = {}  # those of _requests
        self._loaded = False

    async def load(self) -> Ready:
        info = await self._engine.handler.start(self._loading.model_dir, self._loading.options)
        self._served = self._loading.served_model(info)
        self._loaded = True
        gc.collect()
        gc.freeze()  # what is loaded stays; without it every full collection would walk the engine's objects
        return Ready(info.max_model_len, dict(info.details))

    def submit(self, submit: Submit) -> None:
        answer = Answer(self._outbox, submit.id)
        task = asyncio.create_task(serve(submit.input, self._engine, self._served, answer, self._outbox))
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

    async def control(self, operation: str, arguments: Mapping[str, Any]) -> None:
        match operation:
            case "add_adapter":
                adapter = msgspec.convert(arguments, Adapter)
                await self._engine.handler.add_adapter(adapter)
                self._set_adapters(self._served.adapters | {adapter.name})
            case "remove_adapter":
                self._set_adapters(self._served.adapters - {arguments["name"]})
                await self._engine.handler.remove_adapter(arguments["name"])
            case _:
                await super().control(operation, arguments)

    def _set_adapters(self, names: frozenset[str]) -> None:
        self._served = msgspec.structs.replace(self._served, adapters=names)

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
            await self._engine.handler.stop()

    def gauges(self) -> Mapping[str, float]:
        if not self._loaded:
            return {}
        try:
            return dict(self._engine.handler.stats())
        except Exception:  # the border to handlers: gauges that cannot be read must not end the model
            logger.exception("the handler raised in stats()")
            return {}

    def progressed(self) -> list[int]:
        moved = [answer for answer in self._answers.values() if answer.progressed]
        for answer in moved:
            answer.progressed = False
        return [answer.id for answer in moved]
