"""The commands that a worker was sent about its model, and has not answered yet."""

from __future__ import annotations

import asyncio
import itertools

from lmi_server.contract.errors import WorkerDiedError
from lmi_server.contract.link import WorkerLink
from lmi_server.contract.protocol import Command, Control, Error, Frame, Reply


class ControlCalls:
    """The calls to one worker. Their ids are negative, unlike those of requests."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        self._ids = itertools.count(-1, -1)
        self._pending: dict[int, asyncio.Future[Reply | Error | None]] = {}
        self._dead = False

    async def call(self, command: Command) -> bytes:
        """Send `command` to the worker and return the answer.

        Raises the error with which the worker answers, or WorkerDiedError.
        """
        died = WorkerDiedError(f"The worker process ended during {command.operation}")
        if self._dead:
            raise died
        call_id = next(self._ids)
        outcome: asyncio.Future[Reply | Error | None] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = outcome
        self._link.send(Control(call_id, command))
        try:
            answer = await outcome
        finally:
            del self._pending[call_id]
        if answer is None:
            raise died
        if isinstance(answer, Error):
            raise answer.exception()
        return answer.data

    def settle(self, item: Frame) -> bool:
        """Take the answer to a call; return False if `item` does not belong to a call."""
        if item.id >= 0:
            return False
        outcome = self._pending.get(item.id)  # None if the caller has stopped waiting
        if outcome is not None and not outcome.done():
            assert isinstance(item, Reply | Error), "a worker answers a Control with one of these"
            outcome.set_result(item)
        return True

    def fail_all(self) -> None:
        """End every call, and each that is still to come, with WorkerDiedError: the worker is dead."""
        self._dead = True
        for outcome in self._pending.values():
            if not outcome.done():
                outcome.set_result(None)
