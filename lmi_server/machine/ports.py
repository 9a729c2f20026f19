"""Free ports of this machine."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port(allowed: range | None) -> int:
    """Return a port on which nothing listens now, one of the `allowed` ones if they are named.

    Another process may take it before its user does. Raises OSError if none is free.
    """
    # At random, because servers that start together look at the same time.
    for port in (0,) if allowed is None else random.sample(allowed, len(allowed)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            return found
    raise OSError(f"no port of {allowed} is free; SAGEMAKER_SAFE_PORT_RANGE names them")
