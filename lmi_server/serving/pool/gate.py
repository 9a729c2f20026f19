"""Where requests wait that come before their model takes any."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from lmi_server.contract.errors import QueueFullError
from lmi_server.supervisor.job import Deadline, until_deadline


class Gate:
    """Holds requests back until what `opening` returns has been awaited. Up to `capacity` wait at a time.

    `waits_for` says for the message of an error what they wait for.
    """

    def __init__(self, opening: Callable[[], Awaitable[None]], capacity: int, waits_for: str) -> None:
        self.waiting = 0
        self._opening = opening
        self._capacity = capacity
        self._waits_for = waits_for

    async def wait(self, deadline: Deadline | None) -> None:
        """Return once the model takes requests. Raises QueueFullError, DeadlineError, and what opening raises."""
        if self.waiting >= self._capacity:
            raise QueueFullError(f"job_queue_size={self._capacity} requests wait {self._waits_for}")
        self.waiting += 1
        try:
            await until_deadline(self._opening(), deadline, f"waited {self._waits_for}")
        finally:
            self.waiting -= 1
