"""Ports for programs that must be told one and cannot say which they have."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 that no other program gets until the end of the context.

    A socket that does not listen holds it. As this one has SO_REUSEADDR, Linux lets a server that sets it as well, as
    nearly all do, bind the same port and listen.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        yield port
