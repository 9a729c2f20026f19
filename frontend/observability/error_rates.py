"""LMI's limits on errors: after more errors than `error_rate_*` allows, `/ping` answers 503 until a restart."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

from lmi_server.configuration.server_settings import ErrorRate
from lmi_server.contract.errors import DeadlineError, HandlerError, LmiServerError, ServingError

logger = logging.getLogger(__name__)

_ANY = "any"
_FAILED_DEPENDENCY = 424  # LMI's status for errors of the model's code


class ErrorRates:
    """Counts errors by kind: "wlm" if no worker could take or keep the request, "model", "server", and "any" for all.

    `limits` has the allowed number of errors of a kind, and the time in which they count. `clock` returns seconds.
    """

    def __init__(self, limits: Mapping[str, ErrorRate], clock: Callable[[], float] = time.monotonic) -> None:
        self.exceeded = False
        self._limits = limits
        self._clock = clock
        self._times: dict[str, deque[float]] = {kind: deque(maxlen=limit.errors + 1) for kind, limit in limits.items()}

    def count(self, status: int, error: LmiServerError | None) -> None:
        """Count an answer if it is an error of the server or the model. `error` is its cause, if the server has one."""
        kind = _kind(status, error)
        if kind is None or self.exceeded:
            return
        for each in (kind, _ANY):
            if each in self._limits:
                self._add(each)

    def _add(self, kind: str) -> None:
        limit, times = self._limits[kind], self._times[kind]
        times.append(self._clock())
        if len(times) > limit.errors and times[-1] - times[0] <= limit.seconds:
            self.exceeded = True
            logger.error(
                "more than error_rate_%s=%d errors within %g s: /ping answers 503 until the server is restarted",
                kind, limit.errors, limit.seconds,
            )  # fmt: skip


def _kind(status: int, error: LmiServerError | None) -> str | None:
    if isinstance(error, ServingError) and not isinstance(error, HandlerError):
        return "wlm"
    if isinstance(error, DeadlineError):  # the client chose it
        return None
    if status == _FAILED_DEPENDENCY:
        return "model"
    return "server" if status >= 500 else None
