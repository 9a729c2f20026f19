"""Requests that end their worker, and are refused after the second time. Plain data: no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from lmi_server.contract.errors import QuarantinedError
from lmi_server.contract.protocol import Input

_DEATHS = 2
_MAX_SUSPECTS = 1000

# Headers that differ from one attempt to the next, or between clients with the same request.
_VOLATILE = frozenset(
    {
        *("accept-encoding", "authorization", "baggage", "connection", "content-length", "cookie", "date", "host"),
        *("idempotency-key", "traceparent", "tracestate", "user-agent", "x-amzn-requestid", "x-amzn-trace-id"),
        *("x-amzn-sagemaker-inference-id",),
        *("x-forwarded-for", "x-priority", "x-real-ip", "x-request-id", "x-request-timeout"),
    }
)
_VOLATILE_PREFIXES = ("x-b3-", "x-datadog-", "x-stainless-")


@dataclass(slots=True)
class _Suspect:
    until: float
    deaths: int = 0
    is_quarantined: bool = False


class Quarantine:
    """Remembers the requests that workers held when they died, each for `seconds`; 0 remembers none.

    A worker that dies may have held many requests, and one is to blame. So a request is quarantined only if it is
    the only one that has been there `_DEATHS` times, and forgotten once it gets an answer. It is false while there is
    nothing to remember, so that `check` need not be called.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()  # in the order in which they expire

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def check(self, request: Input, now: float) -> bytes:
        """Return the fingerprint of `request`. Raises QuarantinedError if it is not to be served."""
        self._expire(now)
        found = fingerprint(request)
        suspect = self._suspects.get(found)
        if suspect is not None and suspect.is_quarantined:
            raise QuarantinedError(
                f"The request is refused for {suspect.until - now:.0f} seconds, because it has ended its worker "
                f"process {suspect.deaths} times (quarantine_time={self._seconds:g}); see the crash reports in the log"
            )
        return found

    def record(self, fingerprints: Iterable[bytes], now: float) -> bytes | None:
        """Record that a worker died with these requests; return which of them is quarantined from now on."""
        if not self._seconds:
            return None
        present = set(fingerprints)
        for found in present:
            suspect = self._suspects.setdefault(found, _Suspect(now))
            suspect.deaths += 1
            suspect.until = now + self._seconds
            self._suspects.move_to_end(found)
        guilty = [found for found in present if self._suspects[found].deaths >= _DEATHS]
        self._expire(now)
        if len(guilty) != 1 or guilty[0] not in self._suspects:
            return None
        self._suspects[guilty[0]].is_quarantined = True
        return guilty[0]

    def acquit(self, fingerprint: bytes) -> None:
        """Forget a request that was answered."""
        self._suspects.pop(fingerprint, None)

    def _expire(self, now: float) -> None:
        while self._suspects:
            oldest = next(iter(self._suspects.values()))
            if oldest.until > now and len(self._suspects) <= _MAX_SUSPECTS:
                return
            self._suspects.popitem(last=False)


def fingerprint(request: Input) -> bytes:
    """Return what two attempts at the same request have in common: route, query, body, and headers with a meaning."""
    digest = blake2b(request.route.encode(), digest_size=16)
    for name, value in sorted(request.properties.items()):
        if name in _VOLATILE or name.startswith(_VOLATILE_PREFIXES):
            continue
        # The name of a header with the request's id counts. Clients choose that id, and could hide any header by it.
        digest.update((f"\n{name}" if value == request.request_id else f"\n{name}:{value}").encode())
    for name, data in request.content:
        digest.update(f"\n{name}:{len(data)}:".encode())
        digest.update(data)
    return digest.digest()
