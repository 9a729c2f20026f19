"""What arrives of a request: its head and its body are bounded, and count in the memory for bodies."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from http import HTTPStatus

from frontend.http.held_bytes import HeldBytes, MemoryBudget

_MAX_HEAD = 64 * 1024  # bytes of request line and headers, or of what is around the chunks of a body
MAX_HEADERS = 500  # of a request: each takes time and memory, however short it is
_MAX_WAITING = 1000  # requests that a client has sent before the answer to an earlier one
_MAX_PARTS = 2000  # of a body, beside those of _SMALL_PART bytes: each takes time, as a chunk of one byte does
_SMALL_PART = 64
_WAITING_SIZE = 4 * 1024  # bytes that Python takes for each of them
_SMALL_HEAD = 8 * 1024  # bytes that are not counted: nearly all heads are smaller
_HEAD_COPIES = 2  # the headers of the connection, and the properties that are made of them

_TOO_LONG = "Request line and headers are longer than 64 KiB."
_TOO_MANY_WAITING = f"More than {_MAX_WAITING} requests wait for an earlier one on this connection."
_TOO_MANY_PARTS = f"The body comes in more than {_MAX_PARTS} chunks that are shorter than {_SMALL_PART} bytes."
_TOO_MUCH_FRAMING = "Chunk extensions or trailers are longer than 64 KiB."
# Two proxies, or a proxy and this server, could take different ones for the host (RFC 9112, section 3.2). A request
# without any is served, as in LMI.
_WRONG_HOST = "The header Host is sent twice, or is not a host with an optional port."
_HOST = re.compile(rb"(?:\[[0-9A-Za-z:.%_~-]*\]|[0-9A-Za-z._~%!$&'()*+,;=-]*)(?::[0-9]*)?")
_OTHER_VERSION = "Only HTTP/1.0 and HTTP/1.1 are spoken here."

Headers = Sequence[tuple[bytes, bytes]]


class RefusedError(Exception):
    """What arrives is refused. If it is raised through the parser, it stops that."""

    def __init__(self, status: HTTPStatus, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message


TOO_MANY_HEADERS = (
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "BadRequestException",
    f"The request has more than {MAX_HEADERS} headers.",
)


class ArrivingRequest:
    """The request that arrives on a connection; `begin` makes it the next one. Its methods raise RefusedError.

    The parser reports nothing before the end of a header, so that a head without an end would grow for ever. The bytes
    of a head are counted read by read, which is exact enough: only if this upper bound is exceeded, they are counted
    one by one.
    """

    def __init__(self, bodies: MemoryBudget) -> None:
        self.names: list[bytes] = []  # of the headers, as the client wrote them
        self.in_head = False  # from the first byte of a request to the end of its headers
        self.size = 0  # bytes that have come of it
        self.held = HeldBytes(bodies)
        self._bodies = bodies
        self._head_held: HeldBytes | None = None  # of a head that has not arrived as a whole, or was refused
        self._read_size = 0  # bytes of this read
        self._head_began = self._had_body = False  # in this read
        self._first_read = 0  # bytes of the read in which the head began; not all of them need be its own
        self._head_read = 0  # bytes of the head in the whole reads after that one
        self._framing_size = 0  # bytes of reads without any of the body, since the last one with some
        self._parts = 0  # of the body, as they have come

    def begin_read(self, size: int) -> None:
        """Note that the parser gets `size` bytes."""
        self._read_size = size
        self.size += size
        self._head_began = self._had_body = False

    def end_read(self) -> None:
        """Bound what the parser has reported nothing of."""
        if self.in_head:
            self._bound_part_of_head()
        elif not self._head_began:
            self._bound_framing()

    def begin(self) -> None:
        """Begin the next request."""
        self.in_head = self._head_began = True
        self.size = self._framing_size = self._parts = 0
        self._first_read, self._head_read = self._read_size, 0
        self.names = []
        self.release_head()
        self.held = self._head_held = HeldBytes(self._bodies)

    def end_head(self, url: bytes, headers: Headers, http_version: str) -> None:
        """Count and check a head that has arrived as a whole."""
        self.in_head = False
        bound = self._first_read + self._head_read + (0 if self._head_began else self._read_size)
        if bound > _SMALL_HEAD:
            self._count_head(len(url) + sum(len(name) + len(value) + len(": \r\n") for name, value in headers))
        if not http_version.startswith("1."):
            raise RefusedError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "BadRequestException", _OTHER_VERSION)
        _check_host(headers)

    def count_waiting(self, others: int) -> None:
        """Count a request that waits for the answer to an earlier one, as `others` do."""
        if others >= _MAX_WAITING:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "WlmException", _TOO_MANY_WAITING)
        if not self.held.add(_WAITING_SIZE):
            raise self._no_room()

    def accept(self) -> None:
        """Leave the held bytes to the code that answers the request."""
        self._head_held = None

    def add_body(self, size: int, is_answered: bool) -> None:
        """Count a part of the body, until the answer is complete: the request may be sent to another worker till then.

        Bodies in very many small parts are refused.
        """
        self._had_body = True
        self._parts += 1
        if self._parts > _MAX_PARTS + self.size // _SMALL_PART:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "BadRequestException", _TOO_MANY_PARTS)
        if not is_answered and not self.held.add(size):
            raise self._no_room()

    def release_head(self) -> bool:
        """Count nothing of a head that has made no request; return whether there is one."""
        held, self._head_held = self._head_held, None
        if held is not None:
            held.release()
        return held is not None

    def _no_room(self) -> RefusedError:
        return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "WlmException", self._bodies.full)

    def _bound_part_of_head(self) -> None:
        """Bound and count what has come of a head without an end. `_count_head` counts the whole exactly."""
        if not self._head_began:
            self._head_read += self._read_size
        if self._head_read > _MAX_HEAD:
            raise RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "BadRequestException", _TOO_LONG)
        so_far = min(self._first_read + self._head_read, _MAX_HEAD)
        held = self._head_held
        if so_far > _SMALL_HEAD and held is not None and not held.add(_HEAD_COPIES * so_far - held.size):
            raise self._no_room()

    def _bound_framing(self) -> None:
        """Bound the bytes between and behind the chunks of a body, which the parser does not report."""
        self._framing_size = 0 if self._had_body else self._framing_size + self._read_size
        if self._framing_size > _MAX_HEAD:
            raise RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "BadRequestException", _TOO_MUCH_FRAMING)

    def _count_head(self, size: int) -> None:
        """Count a head that is not small like a body."""
        if size > _MAX_HEAD:
            raise RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "BadRequestException", _TOO_LONG)
        counted = _HEAD_COPIES * size if size > _SMALL_HEAD else 0
        if not self.held.add(counted - self.held.size) and counted:
            raise self._no_room()


def _check_host(headers: Headers) -> None:
    is_known = False
    for name, value in headers:
        if name == b"host":
            if is_known or not _is_host(value):
                raise RefusedError(HTTPStatus.BAD_REQUEST, "BadRequestException", _WRONG_HOST)
            is_known = True


@functools.lru_cache(64)
def _is_host(value: bytes) -> bool:
    return _HOST.fullmatch(value) is not None
