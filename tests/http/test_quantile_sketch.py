"""The percentiles of the console against those of the values themselves."""

from __future__ import annotations

import random

import pytest

from frontend.observability.metrics.quantile_sketch import ERROR, QuantileSketch, added_between, sketch_quantile


@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
@pytest.mark.parametrize("middle", [0.0003, 0.02, 0.7, 45])
def test_a_quantile_is_exact_to_two_percent(share: float, middle: float) -> None:
    chance = random.Random(4)
    values = sorted(chance.lognormvariate(0, 0.7) * middle for _ in range(2000))
    sketch = QuantileSketch()
    sketch.observe_all(values)
    exact = values[round(share * len(values)) - 1]
    assert sketch_quantile(sketch.snapshot(), share) == pytest.approx(exact, rel=ERROR * 1.001)


def test_what_was_counted_before_does_not_count() -> None:
    sketch = QuantileSketch()
    sketch.observe(5.0, 100)
    before = sketch.snapshot()
    sketch.observe_all([])
    assert sketch.snapshot() is before
    sketch.observe(0.01, 3)
    assert sum(added_between(before, sketch.snapshot()).values()) == 3
    assert sketch_quantile(added_between(before, sketch.snapshot()), 0.99) == pytest.approx(0.01, rel=ERROR)
    assert sketch_quantile(added_between(before, before), 0.5) is None


def test_the_number_of_buckets_is_bounded() -> None:
    sketch = QuantileSketch()
    sketch.observe_all([0.0, -1.0, float("inf"), float("-inf"), float("nan")])
    sketch.observe_all([10.0**power * factor / 10 for power in range(-12, 12) for factor in range(10, 100)])
    assert len(sketch.snapshot()) < 540
