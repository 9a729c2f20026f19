"""An event loop in the main thread, for a RequestHandler that turned out to serve requests side by side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import uvloop

from lmi_server.contract.protocol import Command, Frames, Ready, Submit
from lmi_server.worker.outgoing import Outgoing
from lmi_server.worker.side_by_side import Serving, SideBySide

_FULL_PAUSE_S = 0.001


class _ToLink:
    """Leads from the main thread's loop to the link, which lives in another thread."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing

    @property
    def congested(self) -> bool:
        return self._outgoing.is_full()

    async def writable(self) -> None:
        while self._outgoing.is_full():  # noqa: ASYNC110 - what it waits for is in another thread
            await asyncio.sleep(_FULL_PAUSE_S)

    def send(self, message: Frames) -> None:
        for item in message.items:
            self._outgoing.put(item)

    def flush(self) -> None:
        """Do nothing: what was put is on its way."""


class MainLoop:
    """`run` is for the main thread, the rest for the link's."""

    def __init__(self, serving: Serving, outgoing: Outgoing) -> None:
        self._serving = serving
        self._outgoing = outgoing
        self._loop: asyncio.AbstractEventLoop
        self._service: SideBySide
        self._stopping: asyncio.Event

    def run(self, on_ready: Callable[[Ready], None]) -> None:
        """Load the model, serve until `stop`. Raises whatever the handler raises while it loads."""
        uvloop.run(self._live(on_ready))

    async def _live(self, on_ready: Callable[[Ready], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._service = SideBySide(self._serving, _ToLink(self._outgoing))
        on_ready(await self._service.load())
        await self._stopping.wait()
        await self._service.stop()

    def submit(self, submit: Submit) -> None:
        self._loop.call_soon_threadsafe(self._service.submit, submit)

    def cancel(self, request_id: int) -> None:
        self._loop.call_soon_threadsafe(self._service.cancel, request_id)

    async def control(self, command: Command) -> bytes:
        """Execute `command`, as `Service.control` does."""
        done = asyncio.run_coroutine_threadsafe(self._service.control(command), self._loop)
        return await asyncio.wrap_future(done)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the handler has ended the loop
            self._loop.call_soon_threadsafe(self._stopping.set)

    def progressed(self) -> list[int]:
        return self._service.progressed()
