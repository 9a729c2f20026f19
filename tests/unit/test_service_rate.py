from __future__ import annotations

import pytest

from lmi_server.serving.service_rate import ServiceRate, retry_after


def saturated(places: int, service_s: float, generations: int, rate: ServiceRate | None = None) -> ServiceRate:
    """Return a rate that saw all places freed together, once in every `service_s` seconds, from second 0 on."""
    rate = rate or ServiceRate()
    rate.begin(0.0)
    for number in range(1, generations + 1):
        rate.ended(places, places, number * service_s)
    return rate


def test_nothing_is_known_until_every_place_was_freed_once() -> None:
    rate = ServiceRate()
    assert rate.wait_s(10, 5.0) is None
    rate.begin(0.0)
    rate.ended(3, 4, 1.0)
    assert rate.wait_s(10, 1.0) is None
    rate.ended(1, 4, 2.0)
    assert rate.wait_s(9, 2.0) == pytest.approx(10 * 2 / 4, rel=0.2)


@pytest.mark.parametrize("generations", [1, 2, 50])
def test_the_wait_is_the_number_of_requests_ahead_by_the_rate(generations: int) -> None:
    rate = saturated(places=8, service_s=2.0, generations=generations)
    assert rate.wait_s(39, 2.0 * generations) == pytest.approx(10.0)


def test_time_without_waiting_requests_does_not_count() -> None:
    rate = saturated(places=2, service_s=1.0, generations=20)
    rate.end(20.0)
    assert rate.wait_s(9, 5000.0) == pytest.approx(5.0)
    rate.begin(9000.0)
    rate.ended(2, 2, 9001.0)
    assert rate.wait_s(9, 9001.0) == pytest.approx(5.0)


def test_a_new_rate_takes_the_place_of_the_old_one() -> None:
    rate = saturated(places=4, service_s=1.0, generations=50)
    for number in range(1, 41):
        rate.ended(4, 4, 50 + number * 0.1)
    assert rate.wait_s(39, 54.0) == pytest.approx(1.0, rel=0.05)


def test_a_wait_grows_while_no_request_ends() -> None:
    rate = saturated(places=1, service_s=1.0, generations=50)
    waits = [rate.wait_s(0, 50.0 + seconds) for seconds in (0, 10, 1000)]
    assert waits[0] == pytest.approx(1.0)
    assert waits[2] > 50
    assert waits == sorted(waits)


def test_what_was_measured_of_other_workers_is_forgotten() -> None:
    rate = saturated(places=1, service_s=1.0, generations=5)
    rate.forget()
    assert rate.wait_s(0, 6.0) is None
    assert not rate.is_measuring


@pytest.mark.parametrize(("wait_s", "header"), [(None, 1), (0.0, 1), (0.2, 1), (1.2, 2), (59.5, 60), (1e9, 60)])
def test_retry_after_is_whole_seconds_within_bounds(wait_s: float | None, header: int) -> None:
    assert retry_after(wait_s) == header
