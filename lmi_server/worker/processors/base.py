"""How one request is answered, by the kind of handler."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping

from lmi_server.contract.errors import (
    EXITS,
    HandlerError,
    LmiServerError,
    RequestError,
    WorkerDiedError,
    exit_message,
    failure_of,
)
from lmi_server.contract.handler import ModelInfo
from lmi_server.contract.protocol import Command, Input
from lmi_server.worker.answers.frame_buffer import ResponseWriter

logger = logging.getLogger(__name__)


class RequestProcessor(ABC):
    """Answers requests one by one; every method runs on the event loop of the handler."""

    @abstractmethod
    async def start(self) -> ModelInfo:
        """Load the model. Raises whatever the handler raises."""

    async def process(self, request: Input, writer: ResponseWriter) -> None:
        """Answer `request`; `writer` has ended exactly once when this returns, whatever the handler raises."""
        try:
            await self._answer(request, writer)
        except asyncio.CancelledError:
            if is_cancelled():
                writer.drop()  # unless the worker has failed all requests before its event loop ends
            else:
                writer.fail(HandlerError("the handler cancelled the request"))
        except LmiServerError as error:
            writer.fail(error)
        except EXITS as error:
            writer.fail(WorkerDiedError(exit_message(error)))
            writer.buffer.seal()  # the event loop ends and cancels the other requests, which must not report that
            raise
        except BaseException as error:  # the border to handlers, which raise anything; the request ends with it
            logger.exception("request %s: the handler raised", request.request_id)
            writer.fail(failure_of(error))

    @abstractmethod
    async def _answer(self, request: Input, writer: ResponseWriter) -> None:
        """Answer `request`. Raises whatever the handler raises."""

    @abstractmethod
    async def stop(self) -> None:
        """Release the model."""

    async def control(self, command: Command) -> bytes:
        """Execute `command` and return the data of its Reply.

        Raises RequestError if the handler does not support it, or whatever the handler raises.
        """
        raise unsupported_error(command)

    def stats(self) -> Mapping[str, float]:
        """Return the gauges of the handler."""
        return {}

    def note_waiting(self, requests: int) -> None:
        """Note how many requests wait in the front end."""
        return


def unsupported_error(command: Command) -> RequestError:
    """Return the error for a command that the handler of this model does not support."""
    return RequestError(f"the handler of this model does not support the operation {command.operation}")


def is_cancelled() -> bool:
    """Return whether somebody cancelled the running task; a handler may also raise a CancelledError of its own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
