"""What this worker process does to load its model, and how far it is: its handler reports, its heartbeat tells."""

from __future__ import annotations

from lmi_server.contract.progress import BYTES, Pace, Progress

_pace = Pace()
_last: Progress | None = None


def report(what: str, done: int = 0, total: int | None = None, unit: str = BYTES) -> None:
    """Say that `done` of `total` of `what` are complete; without a total, that `what` has begun. Any thread may."""
    global _last
    _last = _pace.report(what, done, total, unit) or _last


def last() -> Progress | None:
    """Return the last report, None before the first."""
    return _last
