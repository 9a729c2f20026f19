"""The end of the server: what was accepted is finished or refused within `drain_timeout`, and the rest ends with it.

drain_timeout       requests that are not finished fail
+ _ANSWERED_S       calls that have no answer yet get 503
+ _CLOSED_S         connections are closed, and what is not stored is given up
+ _KILLED_S         workers that have not ended are killed
+ _FORCED_S         the process ends, although a thread of it waits for a file or another machine
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from lmi_server.serving.models.registry import ModelRegistry
from lmi_server.serving.pool.worker_pool import SHUTTING_DOWN, WORKER_STOP_S

logger = logging.getLogger(__name__)

_ANSWERED_S = 0.4
_CLOSED_S = 0.8
_KILLED_S = 1.3
_FORCED_S = 1.6
_MIN_STOP_S = 0.2


class Answering(Protocol):
    """The server of requests without a client."""

    def drain(self) -> None:
        """Begin to end."""

    async def finish(self) -> None:
        """Wait until all have ended, and their answers are stored."""

    def give_up(self) -> None:
        """Log which answers are not stored."""


class OpenConnections(Protocol):
    """The connections of clients."""

    should_exit: bool

    def refuse_unfinished(self, message: str) -> None:
        """Refuse requests that have not arrived as a whole."""

    def refuse_unanswered(self, message: str) -> None:
        """Refuse requests whose answers have not begun."""


class ServerEnd:
    """Ends one server, whose requests get `drain_timeout_s` seconds."""

    def __init__(self, drain_timeout_s: float, models: ModelRegistry, app: Answering, http: OpenConnections) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._models = models
        self._app = app
        self._http = http

    async def run(self, serving: asyncio.Task[None], close_reports: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Drain, then end. `serving` is the task of the connections; `close_reports` writes what is left to report."""
        drained_at = asyncio.get_running_loop().time() + self._drain_timeout_s
        self._http.should_exit = True
        self._http.refuse_unfinished(SHUTTING_DOWN)
        self._app.drain()
        try:
            async with asyncio.timeout_at(drained_at + _KILLED_S):
                await self._models.drain(self._drain_timeout_s)
                await self._answer_all(serving, drained_at)
                limit_s = drained_at + _CLOSED_S - asyncio.get_running_loop().time()
                stopping = self._models.stop(min(WORKER_STOP_S, max(_MIN_STOP_S, limit_s)))
                await asyncio.gather(stopping, close_reports())
        except TimeoutError:
            logger.warning("not all workers have ended; killing them")
            self._models.kill()

    async def _answer_all(self, serving: asyncio.Task[None], drained_at: float) -> None:
        now = asyncio.get_running_loop().time
        finishing = asyncio.create_task(self._app.finish())
        _, answering = await asyncio.wait({finishing, serving}, timeout=drained_at + _ANSWERED_S - now())
        if answering:
            self._http.refuse_unanswered(SHUTTING_DOWN)
            _, answering = await asyncio.wait(answering, timeout=drained_at + _CLOSED_S - now())
        if finishing in answering:
            self._app.give_up()
        for task in answering:
            task.cancel()


class ForcedEnd:
    """Ends the process some time after the drain, also if the event loop or another thread hangs.

    `before` is called then, in another thread. `code` is the exit code.
    """

    def __init__(self, drain_timeout_s: float, before: Callable[[], None]) -> None:
        self.code = 1
        self._before = before
        self._timer = threading.Timer(drain_timeout_s + _FORCED_S, self._end)
        self._timer.daemon = True

    def begin(self) -> None:
        self._timer.start()

    def leave(self) -> None:
        """Leave the end to the interpreter, unless it would wait for a thread."""
        others = set(threading.enumerate()) - {threading.current_thread()}
        if all(thread.daemon for thread in others):
            self._timer.cancel()

    def _end(self) -> None:
        try:
            logger.warning("ending at once: something waits for a file or for another machine")
            self._before()
        finally:
            os._exit(self.code)
