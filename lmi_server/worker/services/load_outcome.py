"""What became of loading a model: said in the handler's thread, waited for in the link's."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from lmi_server.contract.errors import EXITS, ModelLoadError, describe, exit_message
from lmi_server.contract.protocol import Ready


class LoadOutcome:
    """Is set once. A failure that is said later changes nothing."""

    def __init__(self) -> None:
        self._result: Future[Ready] = Future()
        self._result.set_running_or_notify_cancel()  # a shutdown cancels who waits for it, but not the future itself

    async def wait(self) -> Ready:
        """Return once the model is loaded. Raises the error with which it could not be."""
        return await asyncio.wrap_future(self._result)

    def succeed(self, ready: Ready) -> None:
        """Say that the model is loaded."""
        self._result.set_result(ready)

    @property
    def is_loaded(self) -> bool:
        return self._result.done() and self._result.exception() is None

    def fail(self, error: BaseException) -> None:
        """Say that the model could not be loaded; what ends processes becomes a ModelLoadError."""
        if self._result.done():
            return
        if isinstance(error, EXITS):
            error = ModelLoadError(exit_message(error))
        elif not isinstance(error, Exception):
            error = ModelLoadError(describe(error))
        self._result.set_exception(error)
