"""What serves the requests of one model in a worker: the side of it that the link's event loop sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from lmi_server.contract.errors import RequestError
from lmi_server.contract.protocol import CANCELLED, RECALLED, Command, Error, Ready, Submit


class Service(ABC):
    """Serves the requests of one model. Every method runs on the link's event loop."""

    @abstractmethod
    async def load(self) -> Ready:
        """Load the model. Raises whatever the handler raises."""

    @abstractmethod
    def submit(self, submit: Submit) -> None:
        """Serve one request; it ends with exactly one terminal item."""

    @abstractmethod
    def cancel(self, request_id: int) -> None:
        """Drop a request where that is possible. Nothing happens where it has ended."""

    @abstractmethod
    def recall(self, request_id: int) -> None:
        """Give a request back that has not begun. Nothing happens where it has."""

    @abstractmethod
    async def finish(self, deadline_s: float) -> None:
        """Wait until no request is left, for `deadline_s` seconds at most."""

    @abstractmethod
    async def stop(self) -> None:
        """Drop what is left and release the model; nothing that happens now reaches the front end."""

    @abstractmethod
    def gauges(self) -> Mapping[str, float]:
        """Return the gauges of the handler."""

    async def control(self, command: Command) -> bytes:
        """Execute `command` and return the data of its Reply.

        Raises RequestError where this model does not, or whatever the handler raises.
        """
        raise unsupported(command)

    def progressed(self) -> list[int]:
        """Return the requests for which something happened since the last call that the front end has not seen."""
        return []


def unsupported(command: Command) -> RequestError:
    """Return the error for a command that the handler of this model does not support."""
    return RequestError(f"the handler of this model does not support the operation {command.operation}")


def cancelled(request_id: int) -> Error:
    """Return the ending of a request that the front end cancelled."""
    return Error(request_id, CANCELLED, "cancelled by the front end")


def recalled(request_id: int) -> Error:
    """Return the ending, here, of a request that the front end gives to another worker."""
    return Error(request_id, RECALLED, "recalled by the front end")
