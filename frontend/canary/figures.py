"""How the requests of one version of a model ended, and how long they took."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from frontend.canary.sessions import RequestCounts, SessionCounts
from lmi_server.bench.paired import PairedRatios
from lmi_server.contract.errors import AbortedError, RequestError
from lmi_server.contract.protocol import Error, Item, Reply

_KEPT = 500  # latencies
_FAILED, _REFUSED = 500, 400
_LMI_REFUSED_OR_FAILED = 424  # LMI's status of a request that its handler has refused, and of one that has failed
_LMI_REFUSAL = "BadRequestException"
_LONGEST = 1 << 16  # bytes of an error that is read


class AnswerOutcome(Enum):
    """How a request ended.

    REFUSED is what the client got wrong, did not wait for, or sent when there was no room, and what a call has aborted:
    it says nothing of either version by itself.
    """

    SUCCESS = "success"
    REFUSED = "refused"
    ERROR = "error"


class _LmiError(msgspec.Struct):
    type: str = ""


def outcome_of(status: int, terminal: Item | None) -> AnswerOutcome:
    """Return what a status, and the last item of the answer, say."""
    if status < _REFUSED:
        return AnswerOutcome.SUCCESS
    if isinstance(terminal, Error) and isinstance(terminal.exception(), (RequestError, AbortedError)):
        return AnswerOutcome.REFUSED  # also with a status of 504: the client may set as short a deadline as it likes
    if status == _LMI_REFUSED_OR_FAILED:
        return AnswerOutcome.REFUSED if _is_refusal(terminal) else AnswerOutcome.ERROR
    return AnswerOutcome.ERROR if status >= _FAILED else AnswerOutcome.REFUSED


def _is_refusal(terminal: Item | None) -> bool:
    if not isinstance(terminal, Reply) or len(terminal.data) > _LONGEST:
        return False  # a stream that has begun was not refused
    try:
        return msgspec.json.decode(terminal.data, type=_LmiError).type == _LMI_REFUSAL
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


@dataclass
class Endings(RequestCounts):
    """How requests ended. Requests `refused` to their clients say nothing of a version; the others judge it."""

    errors: int = 0
    refused: int = 0

    @property
    def judging(self) -> int:
        """Return how many requests say something of the version."""
        return self.requests - self.refused

    @property
    def error_rate(self) -> float:
        return self.errors / self.judging if self.judging else 0.0


class Figures:
    """Counts and latencies of the requests that count: of a session the first `max_of_session`, None for all.

    `seconds` are the latest seconds per output token, or per answer without a text.
    """

    def __init__(self, max_of_session: int | None = None) -> None:
        self.seconds: deque[float] = deque(maxlen=_KEPT)
        self.uncounted = 0
        self._max_of_session = max_of_session
        self._counts = SessionCounts(Endings)

    @property
    def total(self) -> Endings:
        return self._counts.total

    def has_room(self, session: bytes | None) -> bool:
        """Return whether another request of a session counts."""
        return self._max_of_session is None or self._counts.requests_of(session) < self._max_of_session

    def add(self, outcome: AnswerOutcome, seconds: float, session: bytes | None = None) -> bool:
        """Count a request that has ended; only answers have a latency. Return False if it does not count."""
        if not self.has_room(session):
            self.uncounted += 1
            return False
        for counts in self._counts.counts_of(session):
            counts.requests += 1
            counts.errors += outcome is AnswerOutcome.ERROR
            counts.refused += outcome is AnswerOutcome.REFUSED
        if outcome is AnswerOutcome.SUCCESS:
            self.seconds.append(seconds)
        return True

    def without_most_errors(self) -> Endings:
        """Return the counts without the session that has most errors."""
        return self._counts.without_worst(lambda each: each.errors)

    def without_most_refusals(self) -> Endings:
        """Return the counts without the session that was refused most."""
        return self._counts.without_worst(lambda each: each.refused)

    @property
    def latency(self) -> PairedRatios | None:
        """Return the latencies with an interval of their median; None without any."""
        return PairedRatios.from_values(self.seconds) if self.seconds else None

    def describe(self) -> dict[str, Any]:
        """Return what the management API says."""
        latency, total = self.latency, self.total
        median = {} if latency is None else {"medianMs": latency.median * 1000}
        interval = {} if latency is None else {"intervalMs": [bound * 1000 for bound in latency.interval]}
        counts = {"requests": total.requests, "errors": total.errors, "refused": total.refused}
        return {**counts, "uncounted": self.uncounted, **median, **interval}
