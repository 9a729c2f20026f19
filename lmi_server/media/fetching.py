"""Fetches what a request names by URL, from public addresses, with bounds on the bytes and on the time in all."""

from __future__ import annotations

import contextlib
import io
import re
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.error import URLError
from urllib.request import (
    BaseHandler,
    FTPHandler,
    HTTPHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    build_opener,
)

from lmi_server.media.public_addresses import connect_to_any, connect_to_public

LIMIT_S = 60.0
MAX_BYTES = 64 << 20
_PIECE = 1 << 20
_PORT = re.compile(r":\d*$")

_Connect = Callable[..., socket.socket]


def fetch_bytes(
    url: str,
    *,
    private: bool = False,
    limit_s: float = LIMIT_S,
    max_bytes: int = MAX_BYTES,
    hosts: Collection[str] = (),
) -> bytes:
    """Return what an http or https URL answers; with `private`, from any address and by the proxies of the environment.

    If there are `hosts`, it comes from one of these alone, also after a redirect. Raises PrivateAddressError,
    ValueError for another host, TooLargeError if there is more than `max_bytes` bytes of it, TimeoutError if it is not
    here after `limit_s` seconds, and OSError or HTTPException otherwise.
    """
    clock = _Clock(limit_s, connect_to_any if private else connect_to_public)
    with clock.running(), _opener(clock.connect, private, hosts).open(url, timeout=limit_s) as answer:
        return _body(answer, max_bytes)


def _body(answer: Any, max_bytes: int) -> bytes:
    found = io.BytesIO()  # which gives its bytes away without a copy
    while data := answer.read(min(_PIECE, max_bytes - found.tell() + 1)):
        if found.tell() + len(data) > max_bytes:
            raise TooLargeError(f"what the URL leads to is larger than {max_bytes >> 20} MiB; send a smaller file")
        found.write(data)
    if answer.length:  # http.client takes the end of a connection for that of the answer
        raise OSError(f"the connection ended {answer.length} bytes before the end of the answer")
    return found.getvalue()


class TooLargeError(ValueError):
    """A URL leads to more bytes than the caller takes."""


class _Clock:
    """Cuts the connections of one fetch when its time is over: a timeout of a socket holds for one read alone."""

    def __init__(self, limit_s: float, connect: _Connect) -> None:
        self._limit_s = limit_s
        self._connect = connect
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._over = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Raise TimeoutError at the end if the time is over, whatever else was raised for that reason."""
        timer = threading.Timer(self._limit_s, self._cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (OSError, HTTPException) as error:
            if self._over:
                raise self._late() from error
            raise
        finally:
            timer.cancel()
            self._close()
        if self._over:  # a connection that was cut looks like an answer that has ended
            raise self._late()

    def connect(self, *arguments: Any, **keywords: Any) -> socket.socket:
        connection = self._connect(*arguments, **keywords)
        with self._lock:
            self._connections.append(connection.dup())  # TLS takes the socket itself away
        if self._over:
            connection.close()
            raise self._late()
        return connection

    def _cut(self) -> None:
        with self._lock:
            self._over = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _close(self) -> None:
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()

    def _late(self) -> TimeoutError:
        return TimeoutError(f"what the URL leads to did not arrive within {self._limit_s:g} seconds")


def _opener(connect: _Connect, private: bool, hosts: Collection[str]) -> OpenerDirector:
    """Return what opens URLs. A proxy, or FTP behind a redirect, would connect without the check of the address."""
    proxies = ProxyHandler() if private else ProxyHandler({})
    return build_opener(proxies, _Http(connect), _NoFtp(), _Hosts(hosts))


class _Hosts(BaseHandler):
    """Refuses requests to other hosts than the named ones; an empty collection names all."""

    handler_order = 0

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)

    def _check(self, req: Request) -> Request:
        # Of what is connected to: urlsplit ends a host at its first colon, the connection at its last one.
        host = _PORT.sub("", (req.host or "").lower()).strip("[]")
        if self._hosts and host not in self._hosts:
            raise ValueError(f"the URL leads to the host {host}, and option.allowed_media_domains names others")
        return req

    http_request = _check
    https_request = _check


class _Http(HTTPHandler, HTTPSHandler):
    def __init__(self, connect: _Connect) -> None:
        super().__init__()
        self._connect = connect

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_connection_factory(HTTPConnection, self._connect), req)

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_connection_factory(HTTPSConnection, self._connect), req)


def _connection_factory(kind: type[HTTPConnection], connect: _Connect) -> Callable[..., HTTPConnection]:
    """Return a factory of connections that connect with `connect`."""

    def make(*arguments: Any, **keywords: Any) -> HTTPConnection:
        connection = kind(*arguments, **keywords)
        connection._create_connection = connect  # type: ignore[attr-defined]  # there is no public way
        return connection

    return make


class _NoFtp(FTPHandler):
    def ftp_open(self, req: Request) -> Any:
        raise URLError("files are fetched by http and https alone")
