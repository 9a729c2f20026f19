"""Ends requests that are not worth an answer any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from lmi_server.contract.errors import DeadlineError
from lmi_server.supervisor.job import Deadline, Job


def watch(job: Job, deadline: Deadline, on_expired: Callable[[Job, Deadline], None]) -> None:
    """Call `on_expired` when the deadline of `job` has passed, or a millisecond before."""
    left_s = deadline.at - time.monotonic()
    job.timer = asyncio.get_running_loop().call_later(max(left_s, 0), on_expired, job, deadline)


def fail_if_late(job: Job) -> bool:
    """Fail `job`, which has left the queue, if its deadline has passed; return whether it has."""
    deadline = job.deadline
    if deadline is None or deadline.at > time.monotonic():
        return False
    job.fail(
        DeadlineError(
            f"The request waited in the queue until its deadline ({deadline.text} seconds) had passed;"
            " allow more time, or send it again later"
        )
    )
    return True


def fail_running(job: Job, deadline: Deadline) -> None:
    """Fail `job`, which a worker has, because its deadline has passed."""
    job.fail(
        DeadlineError(
            f"The request was not done by its deadline ({deadline.text} seconds) and is cancelled;"
            " allow more time, or ask for fewer tokens"
        )
    )
