"""What the media of one request may take together when they are decoded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from lmi_server.contract.errors import PayloadTooLargeError

_limit = 256 << 20


def limit_media(size: int) -> None:
    """Let the media of each request of this process take `size` bytes: option.max_media_size of its model."""
    global _limit
    _limit = size


class MediaBudget:
    """The limit for one request. Several threads may decode its media."""

    def __init__(self) -> None:
        self._limit = _limit
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, size: int, what: str) -> None:
        """Count `size` bytes before they are decoded. Raises PayloadTooLargeError if the request may not have them."""
        with self._lock:
            self._taken += size
            if self._taken > self._limit:
                raise PayloadTooLargeError(
                    f"{what}: the images and sounds of one request may take option.max_media_size={self._limit} bytes"
                    " when they are decoded; send fewer or smaller ones, or raise it"
                )


_current: ContextVar[MediaBudget | None] = ContextVar("media_budget", default=None)


@contextmanager
def media_of_request() -> Iterator[None]:
    """While one request is read: all media that are opened count together."""
    token = _current.set(MediaBudget())
    try:
        yield
    finally:
        _current.reset(token)


def current_budget() -> MediaBudget:
    """Return the limit for the request that is read; a new one if the request is unknown."""
    return _current.get() or MediaBudget()
