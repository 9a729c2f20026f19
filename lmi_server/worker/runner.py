"""The two sides of a handler that has a thread of its own: what the link's thread asks, and what runs over there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from lmi_server.contract.protocol import Command, Ready, Submit
from lmi_server.worker.answers.frame_buffer import ResponseWriter


class Runner(ABC):
    """Runs requests in the handler's thread. All but `run` is for the link's thread, once the model is loaded."""

    @abstractmethod
    def run(self, on_ready: Callable[[Ready], None]) -> None:
        """Call `on_ready` once the model is loaded, then run requests until `stop`.

        Raises whatever the handler raises while it loads, and SystemExit if the handler ends the process.
        """

    @abstractmethod
    def submit(self, submit: Submit) -> None:
        """Run one request; it ends with exactly one terminal item."""

    @abstractmethod
    def cancel(self, request_id: int) -> None:
        """Drop a request as soon as possible."""

    @abstractmethod
    def hold(self, request_id: int, held: bool) -> None:
        """Stop the stream of a request, or let it go on. Does nothing if it has ended."""

    @abstractmethod
    def recall(self, request_id: int) -> None:
        """Give a request back to the front end. Does nothing if the handler has begun it."""

    @abstractmethod
    async def control(self, command: Command) -> bytes:
        """Execute `command` and return the data of its Reply. Raises whatever the handler raises."""

    @abstractmethod
    def stop(self) -> None:
        """Have `run` return soon. This, too, may come while the model loads."""

    @abstractmethod
    def begun(self) -> Sequence[ResponseWriter]:
        """Return the writers of the requests that the handler has begun."""

    def progressed(self) -> list[int]:
        """Return the requests that moved since the last call without the front end seeing it."""
        return []
