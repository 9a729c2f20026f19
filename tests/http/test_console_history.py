"""What the console keeps of the last five minutes: how much, and of which models."""

from __future__ import annotations

import math
from itertools import count

from frontend.console.history import COLUMNS, SPAN_S, History

BUSY = {
    "tokens": 12.5,
    "requests": 1,
    "running": 2,
    "queue": 0,
    "kv": 0.5,
    "hits": None,
    "ttft": [1, 2, 3],
    "itl": None,
}
IDLE = {"running": 0, "queue": 0, "kv": None}


def test_a_point_has_a_value_for_each_column() -> None:
    history = History()
    history.add("model", 7.0, BUSY)
    (point,) = history.points("model", 0)
    known = {name: value for name, value in zip(COLUMNS, point, strict=True) if not math.isnan(value)}
    assert known == {
        "time": 7, "tokens": 12.5, "requests": 1, "running": 2, "queue": 0, "kv": 0.5,
        "ttft_p50": 1, "ttft_p95": 2, "ttft_p99": 3,
    }  # fmt: skip


def test_it_takes_no_more_memory_however_long_and_however_many() -> None:
    history = History()
    times = count()
    for at in range(2000):
        history.add("", at, BUSY)
        history.add("model", at, BUSY)
    two = history.size_bytes
    assert len(history.points("model", 0)) == 400
    for number in range(300):
        history.add(f"m{number}", 2000 + next(times), BUSY)
    assert history.size_bytes == two / 2 * 51
    assert two < 100_000
    assert history.points("m0", 0) == history.points("model", 0) == []
    assert len(history.points("m299", 0)) == 1


def test_it_covers_five_minutes_of_samples() -> None:
    history = History()
    for sample in range(1000):
        history.add("", sample * 0.8, BUSY)
    times = [point[0] for point in history.points("", 999 * 0.8 - SPAN_S)]
    assert times[-1] - times[0] == SPAN_S
    assert times == sorted(times)


def test_a_model_that_was_active_last_stays_and_one_that_rests_goes() -> None:
    history = History()
    for number in range(50):
        history.add(f"m{number}", number, BUSY)
    history.add("m0", 51, BUSY)
    history.add("m1", 51, IDLE)
    history.add("new", 52, BUSY)
    assert len(history.points("m0", 0)) == 2
    assert history.points("m1", 0) == []  # it rested for longest
    assert len(history.points("m2", 0)) == 1
    history.add("m0", 53 + SPAN_S, IDLE)
    assert history.points("m0", 0) == []
    history.keep({"m2": 1})
    assert history.size_bytes == 2 * History().size_bytes


def test_a_model_without_requests_takes_nothing() -> None:
    history = History()
    before = history.size_bytes
    history.add("idle", 1, IDLE)
    assert history.size_bytes == before
