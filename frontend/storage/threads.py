"""The threads in which an event loop has its store read and write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lmi_server.contract.errors import ServingError

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class StoreThreads:
    """Runs the blocking calls of one feature."""

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, name)

    async def run(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Return what a function of a store returns. Raises OSError."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def serve(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        """The same for a client's call. Raises ServingError if the store fails."""
        try:
            return await self.run(function, *arguments)
        except OSError as error:
            logger.error("the store cannot be used: %s", error)
            raise ServingError(f"the store cannot be used: {error.strerror or error}; try again later") from error
