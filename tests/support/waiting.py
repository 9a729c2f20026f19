"""Waiting for what has no event that a test could wait for."""

from __future__ import annotations

import time
from collections.abc import Callable

_PAUSE_S = 0.005  # so that polling leaves the cores to the processes that the test waits for


def wait_until(condition: Callable[[], object], what: str, limit_s: float = 120.0) -> None:
    """Ask until `condition` holds; fail with `what` after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}"
        time.sleep(_PAUSE_S)
