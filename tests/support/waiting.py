"""Waiting for what has no event that a test could wait for."""

from __future__ import annotations

import time
from collections.abc import Callable

# What the test asks costs processor time, in which the processes that it waits for could do their work. So it asks
# often at first, and less often the longer it has waited.
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.05
_GROWTH = 1.2


def wait_until(
    condition: Callable[[], object], what: str, limit_s: float = 120.0, first_pause_s: float = _FIRST_PAUSE_S
) -> None:
    """Ask until `condition` holds; fail with `what` after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    pause_s = first_pause_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}"
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, pause_s * _GROWTH)
