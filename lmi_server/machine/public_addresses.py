"""Which addresses are of the public internet.

What a request names by URL is fetched from there alone. Otherwise a request could make the server ask others of its own
network, such as the metadata service of a cloud, which answers with credentials.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_allows_private = False


class PrivateAddressError(ValueError):
    """A URL leads to an address that is not public."""


def is_public(address: str) -> bool:
    """Return whether an address is one of the public internet, also if it stands for an IPv4 address."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            found = inner
    return found.is_global and not found.is_multicast


def allow_private() -> None:
    """Let this process fetch from every address: option.allow_private_media of a model with its own code."""
    global _allows_private
    _allows_private = True


def allows_private() -> bool:
    return _allows_private


def connect_to_public(*arguments: Any, **keywords: Any) -> socket.socket:
    """Connect as socket.create_connection does. Raises PrivateAddressError, before anything is sent.

    The connection itself is looked at: a name may stand for another address the next time that it is looked up.
    """
    connection = socket.create_connection(*arguments, **keywords)
    if not is_public(connection.getpeername()[0]):
        connection.close()
        raise PrivateAddressError(
            "the URL leads to an address that is not public; send a data: URL, or set option.allow_private_media=true"
        )
    return connection
