"""The names of LMI's worker, which answers its front end over a socket. The server starts workers of its own."""

from __future__ import annotations

from typing import Any

from djl_python.not_here import not_here

SOCKET_ACCEPT_TIMEOUT = 30.0
"""Seconds for which LMI's worker waits for its front end."""


class PythonSyncEngine:
    """Cannot be made."""

    def __init__(self, args: Any, service: Any) -> None:
        not_here(type(self).__name__, "run lmi-server serve DIR, which starts the workers of the model")
