"""The link's side of a RequestHandler whose code runs in the main thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from lmi_server.contract.errors import ModelMemoryError
from lmi_server.contract.link import FrontendLink
from lmi_server.contract.protocol import (
    AddAdapter,
    Command,
    End,
    Error,
    Frames,
    Item,
    Ready,
    RemoveAdapter,
    Reply,
    Submit,
)
from lmi_server.worker.main_thread import MainThread
from lmi_server.worker.outgoing import Call, Outgoing
from lmi_server.worker.service import Service, cancelled, recalled, unsupported
from lmi_server.worker.watch import Watch, resident_bytes

logger = logging.getLogger(__name__)

_STOP_S = 5.0  # for RequestHandler.stop


class InMainThread(Service):
    """Serves batches one after the other in the main thread; the link's side of it."""

    def __init__(self, main: MainThread, link: FrontendLink, on_exit: Callable[[int], None]) -> None:
        self._main = main
        self._link = link
        options = main.options
        self._watch = Watch(
            *(main.model_name, options.predict_timeout, main.memory_limit_mb),
            running_s=main.running_s,
            stack=main.stack,
            give_up=self._give_up,
        )
        self._calls: dict[int, Call] = {}
        self._forming: list[Call] = []
        self._closed = False
        self._ready = False
        self._idle = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._outgoing = main.outgoing = Outgoing(loop, self._on_items, lambda: link.congested)
        main.on_exit = on_exit

    async def load(self) -> Ready:
        ready = await self._main.load()
        self._ready = True
        return ready

    def submit(self, submit: Submit) -> None:
        call = self._calls[submit.id] = Call(submit.id, submit.input)
        beside = self._main.beside
        if beside is not None:
            beside.submit(submit)
            return
        self._forming.append(call)
        if not submit.more:
            batch, self._forming = self._forming, []
            self._main.deliver(batch)

    def cancel(self, request_id: int) -> None:
        call = self._calls.get(request_id)
        if call is None:
            return
        call.cancelled = True
        if self._main.beside is not None:
            self._main.beside.cancel(request_id)
        elif self._main.waiting.pop(request_id, None) is not None:
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
        """Return the gauges, once a second; and look after the handler while at it."""
        self._watch.look()
        return {"running_requests": len(self._calls), "resident_bytes": resident_bytes()}

    def _give_up(self, reason: str) -> None:
        """End the process although the handler is at work: what it works on fails, the rest goes to another worker."""
        error = ModelMemoryError(reason.partition("\n")[0])
        logger.error("model %s: %s", self._main.model_name, reason)
        if not self._ready:
            self._main.fail_load(error)
            return
        begun = [call for call in list(self._calls.values()) if call.id not in self._main.waiting and not call.ended]
        self._outgoing.leave()
        for call in begun:
            self._outgoing.fail(call, error)
        self._outgoing.leave()
        self._closed = True
        self._main.abandoned = True
        self._main.on_exit(1)

    async def control(self, command: Command) -> bytes:
        if self._main.beside is not None:
            return await self._main.beside.control(command)
        match command:
            case AddAdapter(adapter):
                return (await self._main.ask(lambda handler: handler.add_adapter(adapter))).encode()
            case RemoveAdapter(name):
                return (await self._main.ask(lambda handler: handler.remove_adapter(name))).encode()
        raise unsupported(command)

    def progressed(self) -> list[int]:
        beside = self._main.beside
        return [] if beside is None or not self._ready else beside.progressed()

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
