"""What the clients of a server may take of it, all together and each for itself."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable

from frontend.http.held_bytes import MemoryBudget
from lmi_server.configuration.server_settings import ServerSettings

logger = logging.getLogger(__name__)

_OWN_FILES = 200  # for workers, logs and downloads
_LOG_PAUSE_S = 10.0
_WORTH_GIVING_BACK = 8 << 20  # bytes of bodies: with their pieces and copies they have taken several times as many
_LARGE_BLOCK = 1 << 20  # bytes
_M_MMAP_THRESHOLD = -3  # its number in malloc.h


class ConnectionLimits:
    """The limits of the settings.

    `bodies` is the memory for bodies of requests, `unread` counts the bytes of answers that wait for clients.
    `count_refusal` gets the status of each refusal that comes before any request is known.
    """

    def __init__(self, settings: ServerSettings, count_refusal: Callable[[int], None]) -> None:
        self.count_refusal = count_refusal
        self.head_timeout_s = settings.request_head_timeout
        self.read_timeout_s = settings.response_read_timeout
        self.body_timeout_s = settings.request_body_timeout
        self.max_connections = settings.max_connections or _free_files()
        self.bodies = _memory_for_bodies(settings)
        self.unread = 0
        self._max_unread = settings.max_unread_size
        self._peak = 0  # of `bodies` and `unread` together, since memory was given back
        self._logged_at = 0.0
        self._out_of_files = False
        self.slow_head = (
            f"Request line and headers took longer than request_head_timeout={self.head_timeout_s:g} seconds."
        )
        self._min_rate = settings.min_transfer_rate
        self.paused_body = f"The body paused for longer than request_body_timeout={self.body_timeout_s:g} seconds."
        self.slow_body = f"The body came more slowly than min_transfer_rate={self._min_rate} bytes a second."
        self.too_many = f"The server has max_connections={self.max_connections} clients."

    def transfer_s(self, size: int) -> float:
        """Return the seconds that a client may take to send or read so many bytes."""
        return size / self._min_rate if self._min_rate else math.inf

    @property
    def _held(self) -> int:
        return self.bodies.used + self.unread

    @property
    def has_too_much_unread(self) -> bool:
        return self.unread > self._max_unread

    def note_full(self) -> None:
        """Log that a client was refused, at most every few seconds."""
        now = time.monotonic()
        if now - self._logged_at >= _LOG_PAUSE_S:
            self._logged_at = now
            logger.warning("refusing clients: %s", self.too_many)

    def note_too_much_unread(self, size: int) -> None:
        """Log that a client is dropped because all together have left too much unread."""
        self._peak = max(self._peak, self._held)
        logger.warning(
            "clients have left %d bytes of answers unread, more than max_unread_size=%d; "
            "the connection of one with %d bytes is closed",
            *(self.unread, self._max_unread, size),
        )

    def note_unread(self, size: int) -> None:
        """Log that a client was dropped because it read nothing."""
        logger.warning(
            "a client has left %d bytes of its answer unread for response_read_timeout=%g seconds, or read more slowly "
            "than min_transfer_rate=%d bytes a second; the connection is closed",
            *(size, self.read_timeout_s, self._min_rate),
        )

    def check_files(self) -> None:
        """Log when no file is left for another client (the event loop does not say it), and when there are some again.

        The system then closes new connections at once.
        """
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if not self._out_of_files:
                logger.error("clients and models are turned away: %s; raise the limit (ulimit -n)", error.strerror)
            self._out_of_files = True
        else:
            if self._out_of_files:
                logger.info("there are files for clients and models again")
            self._out_of_files = False

    def give_memory_back(self) -> None:
        """Return free memory to the system after large bodies. The allocator would keep it for the next ones."""
        held = self._held
        self._peak = max(self._peak, held, self.bodies.peak)
        if self._peak - held > _WORTH_GIVING_BACK:
            self._peak = held
            self.bodies.peak = self.bodies.used
            if _has_glibc():
                ctypes.CDLL(None).malloc_trim(0)


def _memory_for_bodies(settings: ServerSettings) -> MemoryBudget:
    limit = max(settings.max_buffered_size, settings.max_request_size)
    return MemoryBudget(
        limit, f"The server holds max_buffered_size={limit} bytes of requests; send this one later, or raise it."
    )


def map_large_blocks() -> None:
    """Have each large block mapped for itself, which goes back to the system as soon as it is free.

    glibc would do that for blocks of up to 32 MiB only until the first of them is free, and keep them from then on. A
    block that grows would be copied, and leave a hole.
    """
    if _has_glibc():
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


def _has_glibc() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")


def _free_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft - _OWN_FILES, soft // 2)
