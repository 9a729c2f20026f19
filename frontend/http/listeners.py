"""The sockets that the server listens on: TCP ports and Unix sockets, for requests and for management."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from lmi_server.configuration.server_settings import UNIX, ServerSettings
from lmi_server.contract.errors import ConfigurationError

BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """The address that a socket listens on: a host in digits with its port, or the path of a Unix socket and None."""

    host: str
    port: int | None

    def accepts(self, server: tuple[str, int | None] | None) -> bool:
        """Return whether a connection came in here; `server` is its own address as ASGI has it.

        Two addresses may have one port number. 0.0.0.0 stands for every IPv4 address and :: for every IPv6 address.
        """
        if server is None or server[1] != self.port:
            return False
        if self.port is None:
            return server[0] == self.host
        own, given = _address(self.host), _address(server[0])
        return own == given or (own.is_unspecified and own.version == given.version)


@dataclass(frozen=True, slots=True)
class Listener:
    """One socket; by its `place` a request knows where it came in."""

    socket: socket.socket
    url: str
    place: Place
    tls: bool = False

    def close(self) -> None:
        """Close the socket, and remove the file of a Unix socket, which outlives it."""
        self.socket.close()
        if self.place.port is None:
            with contextlib.suppress(OSError):
                os.unlink(self.place.host)


def listen(settings: ServerSettings) -> list[Listener]:
    """Return the listener for requests and, if it differs, the one for management. Raises ConfigurationError."""
    return [_listener(host, port, tls, settings.unix_socket_mode) for host, port, tls in _addresses(settings)]


def _addresses(settings: ServerSettings) -> Iterator[tuple[str, int, bool]]:
    serving = (settings.host, settings.port)
    port = settings.port if settings.management_port is None else settings.management_port
    host = settings.management_host or settings.host
    managing = (host, settings.port if host.startswith(UNIX) else port)
    yield (*serving, settings.tls)
    if managing != serving or settings.management_port == 0:
        yield (*managing, settings.tls if settings.management_tls is None else settings.management_tls)


def _listener(host: str, port: int, tls: bool, mode: str) -> Listener:
    try:
        if host.startswith(UNIX):
            path = host.removeprefix(UNIX)
            return Listener(_bind_unix(path, int(mode, 8)), host, Place(path, None))
        return _on_port(_bind(host, port), tls)
    except OSError as error:
        place = host if host.startswith(UNIX) else f"{host} port {port}"
        raise ConfigurationError(f"cannot listen on {place}: {error.strerror}") from error


@functools.lru_cache(64)
def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address without its scope; an IPv4 address written as IPv6 counts as IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _on_port(bound: socket.socket, tls: bool) -> Listener:
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return Listener(bound, f"{'https' if tls else 'http'}://{shown}:{port}", Place(host, port), tls)


def _bind(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


def _bind_unix(path: str, mode: int) -> socket.socket:
    _remove_unused(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777)  # until its mode is set, no client may connect
    try:
        listener.bind(path)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    os.chmod(path, mode)
    listener.listen(BACKLOG)
    return listener


def _remove_unused(path: str) -> None:
    """Remove the socket of a server that was killed. One that answers stays, and so does anything but a socket."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
