"""What is known of a client, and what clients on other machines are not told: where this machine keeps its files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from lmi_server.artifacts.location import BUCKETS, is_hub_id
from lmi_server.contract.errors import LmiServerError, error_from_kind
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.dialects.framing import encode, encode_line

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

Target = tuple[str, str | None, str | None]
"""Where an inference request goes: its route, and the name and version of the model if the path has them."""

Inference = Callable[[Target, Scope, Receive, Send], Awaitable[None]]
"""What answers an inference request."""

_LOOPBACK = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})
# What proxies, gateways and content delivery networks add. X-Amzn-Trace-Id is left out: clients of AWS send it, too.
_ADDED = frozenset(
    {
        *(b"forwarded", b"x-forwarded", b"forwarded-for", b"x-forwarded-for", b"via", b"cdn-loop"),
        *(b"x-real-ip", b"true-client-ip", b"x-client-ip", b"client-ip", b"x-cluster-client-ip", b"x-remote-addr"),
        *(b"x-proxyuser-ip", b"x-varnish", b"x-request-start", b"x-appengine-user-ip"),
    }
)
_ADDED_PREFIXES = (
    *(b"x-forwarded-", b"x-envoy-", b"x-original-", b"x-goog-", b"x-azure-", b"x-arr-", b"x-istio-", b"x-nginx-"),
    *(b"cf-", b"cloudfront-", b"fastly-", b"fly-", b"l5d-", b"x-vercel-", b"x-akamai-", b"akamai-"),
)
_DIRECTORIES = re.compile(r"(?:(?<![\w./:])|(?<=\bfile:)|(?<=\bfile://))/([\w.@+~-]+)/(?:[\w.@+~-]+/)*")


def is_local(scope: Scope) -> bool:
    """Return whether the client is on this machine, as far as the connection shows.

    A proxy on this machine serves others. It shows only if it adds a header; many add none unless they are told to.
    """
    client = scope["client"]
    if _header_of_a_proxy(scope) is not None:
        return False
    if client is None:  # so it is on a Unix socket, and also if it is gone already
        return scope["server"] is not None and scope["server"][1] is None
    return client[0] in _LOOPBACK


def remote_sign(scope: Scope) -> str:
    """Return in words how a client from elsewhere is recognised."""
    header = _header_of_a_proxy(scope)
    if header is not None:
        return f"header {excerpt(header.decode('latin-1'))} says that a proxy sends this request"
    client = scope["client"]
    return "its connection is gone" if client is None else f"this client is at {client[0]}"


def _header_of_a_proxy(scope: Scope) -> bytes | None:
    added = (name for name, _ in scope["headers"] if name in _ADDED or name.startswith(_ADDED_PREFIXES))
    return next(added, None)


def shown_error(error: LmiServerError, scope: Scope) -> LmiServerError:
    """Return the error as this client may read it."""
    message = shown_text(error.message, scope)
    if message == error.message:
        return error
    return error_from_kind(error.kind, message, getattr(error, "code", None))


def shown_text(message: str, scope: Scope) -> str:
    """Return the message of an error as this client may read it.

    Secrets are masked, and for other machines paths keep only their last part.
    """
    masked = SECRETS.mask(message)
    return without_directories(masked) if "/" in masked and not is_local(scope) else masked


def shown_answer(data: bytes, message: str, scope: Scope) -> bytes:
    """Return an answer in JSON that reports the error of this message, as this client may read it."""
    shown = shown_text(message, scope)
    if shown == message:
        return data
    # The last one is how djl_python's answers have a text.
    for encoded in (encode, encode_line, lambda text: json.dumps(text).encode()):
        data = data.replace(encoded(message)[1:-1], encoded(shown)[1:-1])
    return data


def without_directories(text: str) -> str:
    """Return the text with local paths cut to their last part.

    A path of a URL (/v1/models) stays: no such directory is on this machine.
    """
    return _DIRECTORIES.sub(lambda found: "" if os.path.isdir(f"/{found[1]}") else found[0], text)


def shown_path(place: str, name: str, scope: Scope) -> str:
    """Return `place`; on another machine, the client gets `name` instead unless it is on the Hub or in a bucket."""
    return place if place.startswith(BUCKETS) or is_hub_id(place) or is_local(scope) else name
