"""What is known of a client, and what a client on another machine is not told: where this machine keeps its files."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from lmi_server.contract.errors import LmiServerError, error_from_kind
from lmi_server.contract.secrets import SECRETS
from lmi_server.dialects.framing import encode, encode_line

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_PROXIED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"})  # what proxies add
_DIRECTORIES = re.compile(r"(?<![\w./:])/([\w.@+~-]+)/(?:[\w.@+~-]+/)*")


def is_local(scope: Scope) -> bool:
    """Return whether the client is on this machine, as far as the connection shows: a proxy here may serve others."""
    client = scope["client"]
    if any(name in _PROXIED for name, _ in scope["headers"]):
        return False
    if client is None:  # so it is on a Unix socket, and also if it is gone already
        return scope["server"] is not None and scope["server"][1] is None
    return ipaddress.ip_address(client[0]).is_loopback


def shown_error(error: LmiServerError, scope: Scope) -> LmiServerError:
    """Return the error as this client may read it."""
    message = shown_text(error.message, scope)
    if message == error.message:
        return error
    return error_from_kind(error.kind, message, getattr(error, "code", None))


def shown_text(message: str, scope: Scope) -> str:
    """Return the message of an error as this client may read it.

    Nobody reads secrets, and on another machine paths keep only their last part.
    """
    masked = SECRETS.masked(message)
    return without_directories(masked) if "/" in masked and not is_local(scope) else masked


def shown_answer(data: bytes, message: str, scope: Scope) -> bytes:
    """Return an answer in JSON that reports the error of this message, as this client may read it."""
    shown = shown_text(message, scope)
    if shown == message:
        return data
    for encoded in (encode, encode_line, _encode_as_ascii):
        data = data.replace(encoded(message)[1:-1], encoded(shown)[1:-1])
    return data


def _encode_as_ascii(text: str) -> bytes:
    """Return the text in JSON as djl_python's answers have it."""
    return json.dumps(text).encode()


def without_directories(text: str) -> str:
    """Return the text with local paths cut to their last part.

    A path of a URL (/v1/models) stays: no such directory is on this machine.
    """
    return _DIRECTORIES.sub(lambda found: "" if os.path.isdir(f"/{found[1]}") else found[0], text)


def shown_path(place: str, name: str, scope: Scope) -> str:
    """Return `place`, or `name` instead if it is a local path and the client is on another machine."""
    return name if place.startswith("/") and not is_local(scope) else place
