"""The requests that the engine has: they are entered, found by number, and each ends once."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from handlers.rolling_batch.grammars import GrammarMasks
from handlers.rolling_batch.request import Request
from handlers.rolling_batch.schedule.plan import Sequence
from handlers.rolling_batch.schedule.scheduler import Scheduler
from handlers.rolling_batch.speculation.drafting import Drafter
from lmi_server.contract.errors import RequestError, describe, failure_of
from lmi_server.contract.texts.quoting import excerpt

logger = logging.getLogger(__name__)


class LiveRequests:
    """Requests by number, as long as the scheduler has them. `masks` and `drafter` know of the same requests."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.masks = GrammarMasks()
        self.drafter: Drafter | None = None
        self._scheduler = scheduler
        self._requests: dict[int, Request] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __contains__(self, number: int) -> bool:
        return number in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def add(self, request: Request) -> None:
        """Queue a request."""
        number = request.sequence.number
        self._scheduler.add(request.sequence)
        self._requests[number] = request
        if request.grammar is not None:
            self.masks.add(number, request.grammar)
        elif self.drafter is not None:  # the masks of a grammar are computed for one token per step
            self.drafter.add(number, request.sampling)

    def get(self, number: int) -> Request | None:
        """Return a request, None if it has ended."""
        return self._requests.get(number)

    def of(self, sequence: Sequence) -> Request:
        """Return the request of a sequence that the scheduler has."""
        return self._requests[sequence.number]

    def end_alone(self, number: int, error: BaseException, sound: bool = True) -> None:
        """End a request by what failed for it alone. Requests that have ended are ignored. See `forget` for `sound`."""
        request = self._requests.get(number)
        if request is None:
            return
        if not isinstance(error, RequestError):
            logger.error("request %s fails: %s", excerpt(request.label), describe(error), exc_info=error)
        request.emit(error if isinstance(error, RequestError) else failure_of(error))
        self.forget(request, sound)

    def forget(self, request: Request, sound: bool = True) -> None:
        """Drop a request that has ended. Others may reuse its keys and values if they are `sound`."""
        number = request.sequence.number
        del self._requests[number]
        self.masks.remove(number)
        self._scheduler.remove(request.sequence, sound=sound)
        if self.drafter is not None:
            self.drafter.remove(number)
