"""Which requests may wait in the queue of a model."""

from __future__ import annotations

from collections.abc import Callable

from lmi_server.contract.errors import QueueDelayError, QueueFullError
from lmi_server.serving.dispatch.job_queue import JobQueue
from lmi_server.serving.dispatch.router import Router
from lmi_server.serving.dispatch.service_rate import ServiceRate, retry_after
from lmi_server.serving.roster import WorkerRoster
from lmi_server.supervisor.job import Job


class QueueAdmission:
    """Puts requests into the queue, or refuses them and says when there may be room.

    `max_delay_s` is for how long a request may wait, by the rate at which requests end; None for any time. `on_no_room`
    is called when one is refused for that.
    """

    def __init__(
        self,
        queue: JobQueue[Job],
        rate: ServiceRate,
        roster: WorkerRoster,
        router: Router,
        max_delay_s: float | None,
        on_no_room: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._rate = rate
        self._roster = roster
        self._router = router
        self._max_delay_s = max_delay_s
        self._on_no_room = on_no_room

    def admit(self, job: Job) -> Job | None:
        """Put `job` into the queue; return the one that had to fail for it, if one had to.

        Raises QueueFullError and QueueDelayError.
        """
        if self._max_delay_s is not None:
            self._check_delay(job, self._max_delay_s)
        try:
            loser = self._queue.push(job)
        except QueueFullError as error:
            self._advise(error, job)
            raise
        if loser is not None:
            refusal = QueueFullError("The queue is full, and this API key has most of the requests in it")
            self._advise(refusal, job)
            loser.fail(refusal)
        return loser

    def _advise(self, refusal: QueueFullError, job: Job) -> None:
        refusal.retry_after = self._rate.retry_after(self._roster.in_flight, job.queued_at)

    def _check_delay(self, job: Job, allowed_s: float) -> None:
        """Raise QueueDelayError if `job` would wait for longer than `allowed_s`."""
        if not self._roster.ready:
            return
        if not self._rate.is_measuring:
            # What waits although there is room forms a batch.
            if self._queue or self._router.worker_for(job.request) is not None:
                return
            self._rate.begin(job.queued_at)
        wait_s = self._rate.wait_s(self._queue.ahead_of(job), self._roster.in_flight, job.queued_at)
        if wait_s is not None and wait_s > allowed_s:
            self._on_no_room()
            error = QueueDelayError(
                f"The request would wait for about {wait_s:.1f} seconds, and option.max_queue_delay_ms="
                f"{allowed_s * 1000:.0f} allows no more than {allowed_s:g}; send it again later"
            )
            error.retry_after = retry_after(wait_s - allowed_s)
            raise error
