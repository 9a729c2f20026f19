"""What serves the requests of one model in a worker, as the link's event loop sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from lmi_server.contract.protocol import Command, Ready, Submit
from lmi_server.worker.answers.frame_buffer import FrameBuffer, ResponseWriter


class WorkerService(ABC):
    """Serves the requests of one model; their answers go to `buffer`. Every method runs on the link's event loop."""

    buffer: FrameBuffer

    @abstractmethod
    async def load(self) -> Ready:
        """Load the model. Raises whatever the handler raises."""

    @abstractmethod
    def submit(self, submit: Submit, writer: ResponseWriter) -> None:
        """Serve one request; `writer` ends exactly once."""

    @abstractmethod
    def drop(self, writer: ResponseWriter, unless_begun: bool) -> None:
        """Drop a request as soon as possible; with `unless_begun` only if the handler has not begun it.

        The front end gives such a request to another worker. Does nothing if the request has ended.
        """

    @abstractmethod
    async def control(self, command: Command) -> bytes:
        """Execute `command` and return the data of its Reply.

        Raises RequestError if the handler does not support it, or whatever the handler raises.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Drop what is left and release the model; `buffer` is closed."""

    @abstractmethod
    def gauges(self) -> Mapping[str, float]:
        """Return the gauges of the handler."""

    def note_waiting(self, requests: int) -> None:
        """Note how many requests wait in the front end."""
        return

    def tick(self) -> None:
        """Do what is to be done once a second."""
        return

    def stack(self) -> str:
        """Return where the handler's code is, for the log; "" if it has no thread of its own."""
        return ""

    def abandon(self) -> None:
        """Note that the process ends, whatever the handler does."""
        return
