"""What serves the requests of one model in a worker, as the link's event loop sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from lmi_server.contract.errors import RequestError
from lmi_server.contract.protocol import Command, Ready, Submit

CANCELLED_MESSAGE = "cancelled by the front end"


class WorkerService(ABC):
    """Serves the requests of one model. Every method runs on the link's event loop."""

    @abstractmethod
    async def load(self) -> Ready:
        """Load the model. Raises whatever the handler raises."""

    @abstractmethod
    def submit(self, submit: Submit) -> None:
        """Serve one request; it ends with exactly one terminal item."""

    @abstractmethod
    def cancel(self, request_id: int) -> None:
        """Drop a request as soon as possible. Does nothing if it has ended."""

    @abstractmethod
    def hold(self, request_id: int, held: bool) -> None:
        """Stop the stream of a request, or let it go on. Does nothing if it has ended."""

    @abstractmethod
    def recall(self, request_id: int) -> None:
        """Give a request back to the front end. Does nothing if the handler has begun it."""

    def note_waiting(self, requests: int) -> None:
        """Note how many requests wait in the front end."""
        return

    @abstractmethod
    async def finish(self, deadline_s: float) -> None:
        """Wait until no request is left, for `deadline_s` seconds at most."""

    @abstractmethod
    async def stop(self) -> None:
        """Drop what is left and release the model; nothing that happens now reaches the front end."""

    @abstractmethod
    def gauges(self) -> Mapping[str, float]:
        """Return the gauges of the handler."""

    @abstractmethod
    async def control(self, command: Command) -> bytes:
        """Execute `command` and return the data of its Reply.

        Raises RequestError if the handler does not support it, or whatever the handler raises.
        """

    @abstractmethod
    def progressed(self) -> list[int]:
        """Return the requests that moved since the last call without the front end seeing it."""


def unsupported(command: Command) -> RequestError:
    """Return the error for a command that the handler of this model does not support."""
    return RequestError(f"the handler of this model does not support the operation {command.operation}")
