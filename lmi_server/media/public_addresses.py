"""Which addresses are of the public internet.

What a request names by URL is fetched from there alone. Otherwise a request could make the server ask others of its own
network, such as the metadata service of a cloud, which answers with credentials.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterable
from typing import Any

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]
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
    inside = found.is_multicast or found.is_reserved or getattr(found, "is_site_local", False)
    return found.is_global and not inside


def allow_private() -> None:
    """Let this process fetch from every address: option.allow_private_media of a model with its own code."""
    global _allows_private
    _allows_private = True


def allows_private() -> bool:
    return _allows_private


def connect_to_public(
    place: tuple[str, int],
    timeout: float | None = None,
    source_address: tuple[str, int] | None = None,
    options: Iterable[tuple[int, int, int | bytes]] = (),
) -> socket.socket:
    """Connect to a host and port as socket.create_connection does, within `timeout` in all.

    The host is looked up once, and only its public addresses are connected to. Raises PrivateAddressError if it has
    none: before anything is connected, so that the error does not tell whether the port is open.
    """
    found = _addresses(place)
    allowed = [entry for entry in found if is_public(entry[4][0])]
    if not allowed:
        raise PrivateAddressError(
            "the URL leads to an address that is not public; send a data: URL, or set option.allow_private_media=true"
        )
    return _first_connection(allowed, timeout, source_address, options)


def connect_to_any(
    place: tuple[str, int], timeout: float | None = None, source_address: tuple[str, int] | None = None
) -> socket.socket:
    """Connect to a host and port, public or not, within `timeout` in all."""
    return _first_connection(_addresses(place), timeout, source_address, ())


def _addresses(place: tuple[str, int]) -> list[_Address]:
    host, port = place
    return socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)  # type: ignore[return-value]


def _first_connection(
    addresses: Iterable[_Address],
    timeout: float | None,
    source_address: tuple[str, int] | None,
    options: Iterable[tuple[int, int, int | bytes]],
) -> socket.socket:
    ends_at = None if timeout is None else time.monotonic() + timeout
    problem: OSError = TimeoutError("timed out")
    for family, kind, protocol, _, target in addresses:
        left = None if ends_at is None else ends_at - time.monotonic()
        if left is not None and left <= 0:
            break
        connection = socket.socket(family, kind, protocol)
        try:
            for option in options:
                connection.setsockopt(*option)
            connection.settimeout(left)
            if source_address is not None:
                connection.bind(source_address)
            connection.connect(target)
        except OSError as error:
            connection.close()
            problem = error
        else:
            connection.settimeout(timeout)
            return connection
    raise problem
