"""Whether a model can be served, and if not, why."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from lmi_server.contract.errors import LmiServerError, ModelNotReadyError, QueueFullError
from lmi_server.serving.pool_settings import ModelStatus
from lmi_server.serving.roster import WorkerRoster
from lmi_server.supervisor.job import Deadline, until_deadline
from lmi_server.supervisor.replicas import Replicas


class Availability:
    """The state of one model, by its workers and by what became of them.

    `failure` says why the model is given up for good; None while it is not. `closing` is the message for new requests
    from the start of the drain on, `paused` the one for them while the model is to take none. `settled` is set once the
    model is loaded, or cannot be.
    """

    def __init__(self, name: str, roster: WorkerRoster, replica_sets: Sequence[Replicas]) -> None:
        self.failure: LmiServerError | None = None
        self.was_ready = False
        self.closing: str | None = None
        self.paused: str | None = None
        self.settled = asyncio.Event()
        self._name = name
        self._roster = roster
        self._replica_sets = replica_sets

    @property
    def status(self) -> ModelStatus:
        if self.failure is not None:
            return ModelStatus.FAILED
        if self._roster.ready or self.starts_on_demand:
            return ModelStatus.HEALTHY
        return ModelStatus.UNHEALTHY if self.was_ready else ModelStatus.PENDING

    @property
    def starts_on_demand(self) -> bool:
        """Return whether the next request starts a worker, because none has to run and some may."""
        asleep = all(replicas.min_workers == 0 for replicas in self._replica_sets)
        return asleep and self.may_have_workers

    @property
    def may_have_workers(self) -> bool:
        return any(replicas.max_workers for replicas in self._replica_sets)

    def check(self) -> None:
        """Raise ModelNotReadyError if the model takes no requests."""
        reason = self.closing or self.paused
        refusal = self.refusal() if reason is None else ModelNotReadyError(reason)
        if refusal is not None:
            raise refusal

    def refusal(self) -> ModelNotReadyError | None:
        """Return why the model takes no requests, None if it does. It takes some while a worker is being restarted."""
        if self.failure is not None:
            return self._not_ready(self.failure.message)
        if self._roster.ready:
            return None
        if not self.was_ready and not self.starts_on_demand:
            return self._not_ready("it is loading")
        if not self.may_have_workers:
            return self.without_workers()
        if all(replicas.is_failing for replicas in self._replica_sets if replicas.max_workers):
            return self._not_ready("it could not be loaded again; see the log")
        return None

    def without_workers(self) -> ModelNotReadyError:
        return ModelNotReadyError(f"All model workers has been shutdown: {self._name}")  # LMI's words

    def _not_ready(self, reason: str) -> ModelNotReadyError:
        return ModelNotReadyError(f"Model is not ready: {self._name}: {reason}")


class Gate:
    """Holds requests back until what `opening` returns has been awaited. Up to `capacity` wait at a time.

    `waits_for` says for the message of an error what they wait for.
    """

    def __init__(self, opening: Callable[[], Awaitable[None]], capacity: int, waits_for: str) -> None:
        self.waiting = 0
        self._opening = opening
        self._capacity = capacity
        self._waits_for = waits_for

    async def wait(self, deadline: Deadline | None) -> None:
        """Return once the model takes requests. Raises QueueFullError, DeadlineError, and what opening raises."""
        if self.waiting >= self._capacity:
            raise QueueFullError(f"job_queue_size={self._capacity} requests wait {self._waits_for}")
        self.waiting += 1
        try:
            await until_deadline(self._opening(), deadline, f"waited {self._waits_for}")
        finally:
            self.waiting -= 1
