"""How the processor time of a function grows with its input."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

_SIZE = 20_000
_FACTOR = 8
_MAX = 2 * _FACTOR  # times as long may the longer input take; quadratic work takes _FACTOR times more than that
_TRIES = 4
_NEGLIGIBLE_S = 0.005


def assert_linear(call: Callable[[str], object], part: str, size: int = _SIZE) -> None:
    """Call the function with `size` characters of `part`; fail if 8 times as many take more than 16 times as long."""
    short = min(_spent_s(call, part * (size // len(part))) for _ in range(_TRIES))
    most = _MAX * max(short, _NEGLIGIBLE_S)
    long: list[float] = []
    while min(long, default=inf) > most:  # the shortest of all tries decides, so the first that is short enough does
        assert len(long) < _TRIES, f"{part!r}: {short:.4f} s, and {min(long):.4f} s for {_FACTOR} times"
        long.append(_spent_s(call, part * (_FACTOR * size // len(part))))


def _spent_s(call: Callable[[str], object], text: str) -> float:
    before = time.thread_time()
    call(text)
    return time.thread_time() - before
