"""What the system tells of a TCP connection, and Python does not."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from typing import Any

_TCP_CLOSE = 7  # the state of a connection that the client has reset


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
