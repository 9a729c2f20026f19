"""How far a long piece of work is: a download, an installation, the load of a model."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from lmi_server.contract.texts.quoting import excerpt

BYTES = "bytes"
_WINDOW_S = 10.0  # over which a rate is taken
_SAMPLE_S = 0.5
_SHORTEST_S = 1.0  # before which a rate says nothing
_REPORT_S = 0.1  # between two reports of one piece of work
_LONGEST = 200  # characters of what a worker calls its work
_MAX_AMOUNT = 2**53  # what every reader of JSON takes


class Progress(msgspec.Struct, array_like=True, frozen=True):
    """`done` of `total` bytes, or of what `unit` names, are complete, and `rate` more each second.

    `total` is None if it is unknown, or if the work has no amount; `rate` is None until it is known.
    """

    what: str
    done: int = 0
    total: int | None = None
    rate: float | None = None
    unit: str = BYTES

    @property
    def ended(self) -> bool:
        return self.total is not None and self.done >= self.total

    @property
    def percent(self) -> int | None:
        """The share that is complete, rounded down; None if the whole is unknown."""
        if self.total is None:
            return None
        return min(100, 100 * self.done // self.total) if self.total else 100

    @property
    def left_s(self) -> float | None:
        """The seconds that the rest takes at the present rate; None if that is unknown."""
        if self.total is None or not self.rate:
            return None
        return max(0, self.total - self.done) / self.rate

    def bound(self) -> Progress:
        """Return what may be kept and shown of a report by a process that runs a user's code."""
        total = None if self.total is None else min(max(0, self.total), _MAX_AMOUNT)
        done = min(max(0, self.done), _MAX_AMOUNT if total is None else total)
        # A smaller rate would leave more seconds than a float holds; no comparison with NaN is true.
        rate = self.rate if self.rate is not None and 1 / _MAX_AMOUNT <= self.rate <= _MAX_AMOUNT else None
        return Progress(excerpt(self.what, _LONGEST), done, total, rate, excerpt(self.unit, 20))


class Pace:
    """Makes reports of one piece of work after the other: adds rates, and leaves out what comes too fast.

    Any thread may call it.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._what: str | None = None
        self._reported_at = 0.0
        self._samples: deque[tuple[float, int]] = deque()

    def report(self, what: str, done: int = 0, total: int | None = None, unit: str = BYTES) -> Progress | None:
        """Return the report; None if the last one of the same work is hardly older, and this is not its end."""
        now = self._now()
        with self._lock:
            if what != self._what or (self._samples and done < self._samples[-1][1]):
                self._samples.clear()
            elif now < self._reported_at + _REPORT_S and (total is None or done < total):
                return None
            self._what, self._reported_at = what, now
            return Progress(what, done, total, self._rate(now, done), unit)

    def _rate(self, now: float, done: int) -> float | None:
        samples = self._samples
        if not samples or now >= samples[-1][0] + _SAMPLE_S:
            samples.append((now, done))
        while len(samples) > 1 and samples[1][0] <= now - _WINDOW_S:
            samples.popleft()
        began, before = samples[0]
        return (done - before) / (now - began) if now - began >= _SHORTEST_S else None
