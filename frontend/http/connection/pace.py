"""How long a client takes, counted in checks: there is one a second."""

from __future__ import annotations

from http import HTTPStatus

from frontend.http.connection.arrival import RefusedError
from frontend.http.connection_limits import ConnectionLimits

_LINGER_S = 30  # for a client to send the rest of a request that was refused


class ClientPace:
    """The checks of one connection since something happened, and what is too slow."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._lingering: int | None = None
        self._closing = 0
        self.without_data = 0
        self.in_head = self.in_body = 0  # of one request; the former also without any request

    @property
    def lingers(self) -> bool:
        """True once an answer was sent before the end of its request."""
        return self._lingering is not None

    def linger(self) -> None:
        self._lingering = 0

    def has_lingered(self) -> bool:
        """Return whether the client has not ended its side for too long."""
        assert self._lingering is not None
        self._lingering += 1
        return self._lingering > _LINGER_S

    def closes_too_slowly(self) -> bool:
        """Return whether the client does not read its last bytes, without which the connection is not closed."""
        self._closing += 1
        return self._closing > self._limits.read_timeout_s

    def is_idle_too_long(self, in_head: bool) -> bool:
        """Return whether no request comes. Raises RefusedError if a head has begun, and does not end."""
        self.in_head += 1
        is_late = self.in_head > self._limits.head_timeout_s
        if is_late and in_head:
            raise _too_slow(self._limits.slow_head)
        return is_late

    def check_body(self, size: int) -> None:
        """Raise RefusedError if a body pauses, or comes too slowly: a byte now and then is no pause.

        `size` is what has come of the request.
        """
        self.in_body += 1
        limits = self._limits
        if self.without_data > limits.body_timeout_s:
            raise _too_slow(limits.paused_body)
        if self.in_body > limits.body_timeout_s + limits.transfer_s(size):
            raise _too_slow(limits.slow_body)


def _too_slow(message: str) -> RefusedError:
    return RefusedError(HTTPStatus.REQUEST_TIMEOUT, "RequestTimeoutException", message)
