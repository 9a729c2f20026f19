"""The bytes of answers that a client has not read: they are counted, and a client that reads too slowly is dropped."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from typing import Any

from frontend.http.connection_limits import ConnectionLimits
from lmi_server.supervisor.job import ReplySlot

_TCP_CLOSE = 7  # the state of a connection that the client has reset


class UnreadBytes:
    """The unread bytes of one client, while so many wait that nothing more is written.

    `reply` is the answer that is relayed: what waits in it counts, too.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.reply: ReplySlot | None = None
        self.size = 0  # bytes that `limits` counts
        self._limits = limits
        self._left = 0  # bytes at the last check
        self._left_at_pause = 0
        self._checks_paused = 0  # since nothing more is written
        self._checks_unread = 0  # since the client has read some

    @property
    def weight(self) -> int:
        """How much it is, and for how long."""
        return self.size * (self._checks_paused + 1)

    def pause(self, transport: asyncio.Transport) -> None:
        """Begin to count."""
        self._checks_paused = 0
        self.count(transport)

    def resume(self) -> None:
        """Note that the client has read: what waited for it is nearly gone, however full the buffer is again soon."""
        self._checks_unread = 0

    def count(self, transport: asyncio.Transport) -> None:
        size = transport.get_write_buffer_size() + (0 if self.reply is None else self.reply.size)
        self._limits.unread += size - self.size
        self.size = size

    def forget(self) -> None:
        """Count nothing any more."""
        self._limits.unread -= self.size
        self.size = 0

    def is_read_too_slowly(self, transport: asyncio.Transport) -> bool:
        """Return, at a check, whether the client has read nothing for too long, or reads too slowly."""
        self._checks_paused += 1
        self.count(transport)
        left = transport.get_write_buffer_size() + unacknowledged_bytes(transport.get_extra_info("socket"))
        self._checks_unread = 0 if left < self._left else self._checks_unread + 1
        self._left = left
        if self._checks_paused == 1:
            self._left_at_pause = left
        limit_s = self._limits.read_timeout_s
        has_read_s = self._limits.transfer_s(max(0, self._left_at_pause - left))
        if self._checks_unread <= limit_s and self._checks_paused <= limit_s + has_read_s:
            return False
        self._limits.note_unread(left)
        return True


def drop_if_reset(transport: asyncio.Transport) -> None:
    """Drop a client that has reset the connection."""
    if not transport.is_closing() and _state(transport.get_extra_info("socket")) == _TCP_CLOSE:
        transport.abort()


def unacknowledged_bytes(connection: Any) -> int:
    """Return the bytes that the system holds for the other side, 0 if it does not tell."""
    if sys.platform != "linux":
        return 0
    answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def _state(connection: Any) -> int:
    """Return the state of a TCP connection, 0 if the system does not tell."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None or connection.family == socket.AF_UNIX:
        return 0
    return int(connection.getsockopt(socket.IPPROTO_TCP, option, 1)[0])
