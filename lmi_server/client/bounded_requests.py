"""Requests whose whole answer, head and body, is bounded in time and in bytes."""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPMessage, HTTPResponse, HTTPSConnection, IncompleteRead, InvalidURL
from typing import IO, Any, cast
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import (
    BaseHandler,
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    UnknownHandler,
)

from lmi_server.contract.texts.quoting import excerpt

MAX_BYTES = 1 << 26
"""Of an answer."""
_PORTS = {"http": 80, "https": 443}
_PART = 1 << 16


class TooLargeAnswerError(ValueError):
    """An answer has more than MAX_BYTES bytes."""


def open_within(timeout_s: float | None, request: Request) -> HTTPResponse:
    """Return the answer to a request by http or https, which is still to be read.

    What has not come after `timeout_s` seconds raises TimeoutError, also while the answer is read; None waits for as
    long as it takes. Raises OSError and HTTPException if there is no answer, and HTTPError if it is a refusal.
    A request with headers follows no redirect to another server, because they may hold a key.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    opener = OpenerDirector()  # build_opener would also follow a redirect to FTP, which has no such end
    usual = (ProxyHandler, UnknownHandler, HTTPDefaultErrorHandler, HTTPErrorProcessor)
    handlers: list[BaseHandler] = [_Http(end), _Https(end), _Redirects(), *(kind() for kind in usual)]
    for handler in handlers:
        opener.add_handler(handler)
    try:
        return cast(HTTPResponse, opener.open(request, timeout=timeout_s))
    except ValueError as error:  # of the host, or of the URL of a redirect
        raise InvalidURL(str(error)) from error


def read_whole(answer: HTTPResponse | HTTPError) -> bytes:
    """Return the body of an answer. Raises TooLargeAnswerError, and what `open_within` says."""
    data, length = bytearray(), answer.length
    while part := answer.read1(_PART):
        data += part
        if len(data) > MAX_BYTES:
            raise TooLargeAnswerError(f"answers with more than {MAX_BYTES} bytes")
    if length is not None and len(data) < length:
        raise IncompleteRead(bytes(data), length - len(data))
    return bytes(data)


class _Redirects(HTTPRedirectHandler):
    """Follows redirects without their bodies, which the usual handler reads whole, however large they are."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None:
            # It is the proxy's, and ProxyHandler gives it to the proxy of the new URL, if there is one.
            request.headers.pop("Proxy-authorization", None)
        if request is not None and request.headers and not is_same_server(req.full_url, newurl):
            fp.close()
            raise ConnectionError(f"it leads to {excerpt(newurl)}, and headers go to no other server; give that URL")
        answer = cast(HTTPResponse, fp)
        answer.chunked, answer.length = False, 0
        return request


def is_same_server(url: str, other: str) -> bool:
    """Return whether `other` is on the server of `url`, or on the same host by TLS.

    A name and password in front of its host count as another: not every proxy ends them where urlsplit does.
    """
    first, second = urlsplit(url), urlsplit(other)
    before, after = (
        (each.scheme, _PORTS.get(each.scheme) if each.port is None else each.port) for each in (first, second)
    )
    is_same_port = before == after or (before, after) == (("http", 80), ("https", 443))
    return first.hostname == second.hostname and is_same_port and "@" not in second.netloc


class _Http(HTTPHandler):
    def __init__(self, end: float | None) -> None:
        super().__init__()
        self._end = end

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_connections(HTTPConnection, self._end), req)


class _Https(HTTPSHandler):
    def __init__(self, end: float | None) -> None:
        super().__init__()
        self._end = end

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_connections(HTTPSConnection, self._end), req)


def _connections(kind: type[HTTPConnection], end: float | None) -> Callable[..., HTTPConnection]:
    """Return a factory of connections that give up at `end`, of time.monotonic()."""

    def make(*arguments: Any, **keywords: Any) -> HTTPConnection:
        connection = kind(*arguments, **{**keywords, "timeout": _left(end)})
        connection.response_class = make_response  # type: ignore[assignment]
        return connection

    def make_response(connection: socket.socket, **keywords: Any) -> HTTPResponse:
        return HTTPResponse(cast(socket.socket, _TimedSocket(connection, end)), **keywords)

    return make


class _TimedSocket:
    """What HTTPResponse needs of a socket."""

    def __init__(self, connection: socket.socket, end: float | None) -> None:
        self._connection = connection
        self._end = end

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReads(self._connection, self._end))


class _TimedReads(io.RawIOBase):
    """Reads a socket until `end`. The timeout of the socket alone would begin again with each byte."""

    def __init__(self, connection: socket.socket, end: float | None) -> None:
        self._connection = connection
        self._end = end
        self._raw = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._connection.settimeout(_left(self._end))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _left(end: float | None) -> float | None:
    """Return the seconds until `end`. Raises TimeoutError if it is over."""
    if end is None:
        return None
    if (left := end - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return left
