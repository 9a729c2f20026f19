"""How many lines of batches a model has at a time, so that its other requests hardly notice.

The job queue serves lines last. That is not enough: a line that runs slows down all that run with it. So a model has
lines while it has no other request, first one, then more from moment to moment. When a request comes, the lines are
taken back, which frees their places within one step; they begin again later. Each time this happens, the model must be
quiet for longer before it gets lines again: gaps that are too short for a line would cost work and answer nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from lmi_server.serving.models.model import Model

_LOOK_S = 0.02
_QUIET_S = (0.1, 5.0)  # without other requests until a model gets a line: least, most
_GROWTH_S = 0.1  # in which the lines of a quiet model double
_QUEUE_SHARE = 4  # lines wait in at most one of so many places of a job queue


class Line:
    """A line that has its turn. `give_back` ends its request, if it has one; `was_taken` says that it was called."""

    def __init__(self) -> None:
        self.was_taken = False
        self.give_back: Callable[[], None] | None = None


@dataclass
class _Lane:
    """The lines of one model.

    `live_at` is when it last had another request, by time.monotonic(). `quiet_s` is how long it must have none.
    """

    model: Model
    running: dict[Line, None] = field(default_factory=dict)  # the oldest first
    waiting: deque[asyncio.Future[Line]] = field(default_factory=deque)
    live_at: float = field(default_factory=time.monotonic)  # it may well be between two of them
    quiet_s: float = _QUIET_S[0]


class LinePace:
    """Gives lines their turns: up to `concurrency` for each model without other requests, else `beside`."""

    def __init__(self, concurrency: int, beside: int) -> None:
        self._concurrency = concurrency
        self._beside = beside
        self._lanes: dict[Model, _Lane] = {}
        self._watch: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def turn(self, model: Model) -> AsyncIterator[Line]:
        """Wait until the model may have another line, which it has until the block ends."""
        lane = self._lanes.setdefault(model, _Lane(model))
        turn: asyncio.Future[Line] = asyncio.get_running_loop().create_future()
        lane.waiting.append(turn)
        if self._watch is None:
            self._watch = asyncio.create_task(self._look_often())
        self._look(lane)
        try:
            line = await turn
            yield line
            if not line.was_taken:
                lane.quiet_s = max(lane.quiet_s / 2, _QUIET_S[0])
        finally:
            if turn in lane.waiting:
                lane.waiting.remove(turn)
            if turn.done() and not turn.cancelled():
                lane.running.pop(turn.result(), None)
            self._look(lane)

    def note_live(self) -> None:
        """Note that another request comes to a server with one model: it need not wait for the next look."""
        for lane in self._lanes.values():
            self._make_way(lane)

    async def _look_often(self) -> None:
        """Look after the lanes while they have lines."""
        while self._lanes:
            await asyncio.sleep(_LOOK_S)
            for lane in list(self._lanes.values()):
                self._look(lane)
                if not lane.running and not lane.waiting:
                    del self._lanes[lane.model]
        self._watch = None

    def _look(self, lane: _Lane) -> None:
        """Take lines back if the model has other requests; let lines begin if it has room for them."""
        pool = lane.model.pool
        if pool is None:  # it loads, or has failed: the relay says so
            self._begin(lane, self._beside or 1)
            return
        dispatcher, now = pool.dispatcher, time.monotonic()
        own = sum(line.give_back is not None for line in lane.running)
        has_others = dispatcher.in_flight + dispatcher.queued > own
        if has_others:
            self._make_way(lane)
        if dispatcher.queued <= pool.settings.job_queue_size // _QUEUE_SHARE:
            self._begin(lane, self._allowed_lines(now - lane.live_at - lane.quiet_s))

    def _make_way(self, lane: _Lane) -> None:
        """Take back all lines but the oldest few."""
        lane.live_at = time.monotonic()
        taken = [line for line in list(lane.running)[self._beside :] if line.give_back is not None]
        for line in taken:
            if line.give_back is not None:
                line.was_taken = True
                line.give_back()
        if taken:
            lane.quiet_s = min(lane.quiet_s * 2, _QUIET_S[1])

    def _allowed_lines(self, quiet_s: float) -> int:
        """Return how many lines a model may have that has been quiet for so many seconds longer than it must."""
        if quiet_s < 0:
            return self._beside
        doublings = min(int(quiet_s / _GROWTH_S), self._concurrency.bit_length())
        return min(max(self._beside, 1) << doublings, self._concurrency)

    def _begin(self, lane: _Lane, allowed: int) -> None:
        while lane.waiting and len(lane.running) < allowed:
            turn = lane.waiting.popleft()
            if not turn.done():  # else it is cancelled
                line = Line()
                lane.running[line] = None
                turn.set_result(line)
