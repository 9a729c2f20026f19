"""What the console keeps of the last hour: how much, and of which models."""

from __future__ import annotations

import math
from itertools import count

from frontend.console.history import COLUMNS, HOUR_S, SPAN_S, History

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
    assert two < 200_000
    assert history.points("m0", 0) == history.points("model", 0) == []
    assert len(history.points("m299", 0)) == 1


def test_it_covers_five_minutes_of_samples() -> None:
    history = History()
    for sample in range(1000):
        history.add("", sample * 0.8, BUSY)
    times = [point[0] for point in history.points("", 999 * 0.8 - SPAN_S)]
    assert times[-1] - times[0] == SPAN_S
    assert times == sorted(times)


def test_it_covers_an_hour_in_points_of_ten_seconds() -> None:
    history = History()
    for sample in range(3 * 3600):
        history.add("", float(sample), {**BUSY, "tokens": sample % 10, "running": 9 if sample % 10 == 3 else 1})
    points = history.points("", 2 * 3600.0, HOUR_S)
    assert len(points) == 360
    assert len(history.points("", 0, HOUR_S)) <= 363
    assert {point[1] for point in points} == {4.5}  # the mean
    assert {point[3] for point in points} == {9}  # the peak
    assert points[-1][0] - points[0][0] == 3590
    assert all(math.isnan(point[6]) for point in points)


def test_an_hour_has_the_present_too() -> None:
    history = History()
    history.add("", 1.0, BUSY)
    assert len(history.points("", 0, HOUR_S)) == 1


def test_a_clock_that_is_put_back_does_not_make_it_grow() -> None:
    history = History()
    for sample in range(5000):
        history.add("", -float(sample), BUSY)
    assert len(history.points("", -1e9, HOUR_S)) < 30


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
    history.add("m0", 53 + HOUR_S, IDLE)
    assert history.points("m0", 0) == []
    history.keep({"m2": 1})
    assert history.size_bytes == 2 * History().size_bytes


def test_a_model_without_requests_takes_nothing() -> None:
    history = History()
    before = history.size_bytes
    history.add("idle", 1, IDLE)
    assert history.size_bytes == before
