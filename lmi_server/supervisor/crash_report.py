"""The log lines about a worker that ended unasked: how, what it held, and its last words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from lmi_server.supervisor.job import Job

_NAMED_REQUESTS = 20


def requests_inside(jobs: Iterable[Job], now: float) -> list[str]:
    """Return a line for each request that a worker held at `now`."""
    return [
        f"{job.request.request_id} on {job.request.route}, {now - job.sent_at:.1f} s after it was sent" for job in jobs
    ]


def crash_report(end: str, inside: Sequence[str], last_lines: Sequence[str]) -> str:
    """Return the report of a worker that ended as `end` says."""
    parts = [f"crash report: the worker process {end}", f"requests inside: {len(inside)}"]
    parts += [f"    {line}" for line in islice(inside, _NAMED_REQUESTS)]
    if last_lines:
        parts += ["last lines of its log:", *(f"    {line}" for line in last_lines)]
    return "\n".join(parts)
