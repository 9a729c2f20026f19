"""How long requests wait: the measured rate at which the workers of a model finish requests. Plain data: no clock."""

from __future__ import annotations

import math

_GENERATIONS = 4  # times that every place is freed until a measurement has lost most of its weight
_FEWEST = 16  # requests that a measurement spans at least
_NEWEST_SERVICE = 1 / 32  # the weight of the last request in the mean service time
_LONGEST_RETRY_S = 60


class ServiceRate:
    """Measures how many requests end in a second while others find no worker with room.

    At other times the rate says how many requests come, and not how many the workers can take. A second estimate is the
    mean time that a request takes in a worker, by the number of requests there (Little's law). It is known before
    anything has waited. It also corrects a rate that is too high because old requests ended right after the
    measurement's start. All times come from one clock, in seconds.
    """

    def __init__(self) -> None:
        self.is_measuring = False
        self._since = 0.0
        self._ended = 0.0  # requests, and the seconds in which they ended; the older, the less they weigh
        self._seconds = 0.0
        self._seen = 0  # requests that have ended since the measurement began
        self._service_s: float | None = None

    def begin(self, now: float) -> None:
        """Note that a request found no worker with room."""
        if not self.is_measuring:
            self.is_measuring = True
            self._since = now

    def end(self, now: float) -> None:
        """Note that no request waits for room any more."""
        if self.is_measuring:
            self.is_measuring = False
            self._seconds += now - self._since

    def add_ended(self, count: int, places: int, now: float) -> None:
        """Note that `count` requests have ended on workers with `places` places."""
        keep = max(0.0, 1 - count / max(_GENERATIONS * places, _FEWEST))
        self._ended = self._ended * keep + count
        self._seconds = self._seconds * keep + now - self._since
        self._since = now
        self._seen += count

    def add_service(self, seconds: float) -> None:
        """Note that a worker had a request for this time."""
        if self._service_s is None:
            self._service_s = seconds
        else:
            self._service_s += _NEWEST_SERVICE * (seconds - self._service_s)

    def forget(self) -> None:
        """Forget the measured rate: the workers are others now."""
        self.is_measuring = False
        self._ended = self._seconds = 0.0
        self._seen = 0

    def wait_s(self, ahead: int, in_flight: int, now: float) -> float | None:
        """Return how long a request waits that has `ahead` others before it while workers have `in_flight` requests.

        It is the longer one of both estimates; None if no request has ended. The measured rate counts once every place
        has been freed: the first requests that end are the short ones.
        """
        if self._service_s is None or not in_flight:
            return None
        per_request = self._service_s / in_flight
        if self._seen >= in_flight:
            seconds = self._seconds + (now - self._since if self.is_measuring else 0.0)
            per_request = max(per_request, seconds / self._ended)
        return (ahead + 1) * per_request

    def retry_after(self, in_flight: int, now: float) -> int:
        """Return the seconds until the next request leaves the queue, for a Retry-After header."""
        return retry_after(self.wait_s(0, in_flight, now))


def retry_after(wait_s: float | None) -> int:
    """Return the value of a Retry-After header for a wait that may not be known."""
    return min(max(math.ceil(wait_s or 0), 1), _LONGEST_RETRY_S)
