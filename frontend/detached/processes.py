"""Which process runs a request without a client, and whether it still lives."""

from __future__ import annotations

import os
import socket
import time

_HERE = f"{socket.gethostname()}:{os.getpid()}"


def process_name() -> str:
    """Return a name of this process that no other one has had."""
    return f"{_HERE}:{time.time_ns()}"


def is_gone(name: str, own: str) -> bool:
    """Return whether the process of a name was one of this machine and has ended. `own` is the name of this process.

    A container that starts again may give its process the number of the one before.
    """
    host, _, rest = name.partition(":")
    pid = rest.partition(":")[0]
    if host != socket.gethostname() or name == own:
        return False
    return f"{host}:{pid}" == _HERE or not os.path.exists(f"/proc/{pid}")
