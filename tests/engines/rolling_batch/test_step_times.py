"""The times of steps are learnt from the steps, and what is not confirmed is tried again, ever more rarely."""

from __future__ import annotations

import pytest

from handlers.rolling_batch.speculation.drafting import worthwhile_length
from handlers.rolling_batch.speculation.step_times import StepTimes


def test_before_any_step_the_time_grows_by_the_share_of_a_row() -> None:
    times = StepTimes(0.1)
    assert times(11) / times(1) == pytest.approx(2.0)
    times.observe(1, 0.020)
    assert times(11) == pytest.approx(0.040)


def test_what_was_measured_counts_and_what_lies_between_is_estimated() -> None:
    times = StepTimes(0.1)
    for rows, seconds in ((8, 0.020), (4, 0.012), (16, 0.060)):
        times.observe(rows, seconds)
    assert [times(rows) for rows in (4, 8, 16)] == pytest.approx([0.012, 0.020, 0.060])
    assert times(6) == pytest.approx(0.016)
    assert times(2) == pytest.approx(0.012 * 1.1 / 1.3)
    assert times(31) == pytest.approx(0.060 * 4.0 / 2.5)


def test_a_step_that_something_held_up_has_little_weight_and_a_lasting_change_is_followed() -> None:
    times = StepTimes(0.1)
    for _ in range(5):
        times.observe(8, 0.010)
    times.observe(8, 3.0)
    assert times(8) < 0.013
    for _ in range(20):
        times.observe(8, 0.030)
    assert times(8) == pytest.approx(0.030, rel=0.02)


def drafting_steps(times: StepTimes, seconds: dict[int, float], steps: int) -> list[int]:
    """Run steps of eight sequences, whose drafted tokens are nearly always right; return which steps had some."""
    drafted = []
    for step in range(steps):
        count = worthwhile_length([0.95] * 8, 8, times)
        if count:
            drafted.append(step)
        times.observe(8 + count, seconds[8 + count])
    return drafted


def test_drafts_that_do_not_pay_are_tried_ever_more_rarely() -> None:
    """With drafts, a step takes three times as long, which nobody expected."""
    seconds = {8: 0.020} | dict.fromkeys(range(9, 17), 0.060)
    drafted = drafting_steps(StepTimes(0.0), seconds, 20_000)
    assert drafted[0] == 1  # the first step has none, to compare with
    early, late = (sum(start <= step < start + 5000 for step in drafted) for start in (0, 15_000))
    assert early < 50
    assert late < 10
    assert len([step for step in drafted if step > 5000]) > 0  # never given up


def test_drafts_that_begin_to_pay_are_found_and_kept() -> None:
    times = StepTimes(0.05)
    slow = {8: 0.020} | dict.fromkeys(range(9, 17), 0.060)
    assert len(drafting_steps(times, slow, 300)) < 20
    fast = {8: 0.020} | dict.fromkeys(range(9, 17), 0.021)
    drafted = drafting_steps(times, fast, 3000)
    assert len(drafted) > 1500
    assert set(range(2900, 3000)) - set(drafted) == set()
