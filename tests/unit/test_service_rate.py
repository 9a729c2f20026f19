from __future__ import annotations

import pytest

from lmi_server.serving.dispatch.service_rate import ServiceRate, retry_after


def saturated(places: int, service_s: float, generations: int, begin: float = 0.0) -> ServiceRate:
    """Return a rate that saw all places freed together, once in every `service_s` seconds from second 0 on.

    Other requests waited from second `begin` on.
    """
    rate = ServiceRate()
    rate.begin(begin)
    for number in range(1, generations + 1):
        rate.add_ended(places, places, number * service_s)
        for _ in range(places):
            rate.add_service(service_s)
    return rate


def test_nothing_is_known_before_a_request_has_ended() -> None:
    rate = ServiceRate()
    assert rate.wait_s(10, 4, 5.0) is None
    rate.begin(0.0)
    assert rate.wait_s(10, 4, 5.0) is None


def test_before_anything_has_waited_the_time_that_requests_take_decides() -> None:
    rate = ServiceRate()
    rate.add_service(2.0)
    assert rate.wait_s(39, 8, 0.0) == pytest.approx(10.0)
    assert rate.wait_s(39, 0, 0.0) is None, "the workers are gone"
    for _ in range(200):
        rate.add_service(4.0)
    assert rate.wait_s(39, 8, 0.0) == pytest.approx(20.0, rel=0.01)


@pytest.mark.parametrize("generations", [1, 2, 50])
@pytest.mark.parametrize("begin", [0.0, 1.9])
def test_the_wait_is_the_number_of_requests_ahead_by_the_rate(generations: int, begin: float) -> None:
    rate = saturated(places=8, service_s=2.0, generations=generations, begin=begin)
    assert rate.wait_s(39, 8, 2.0 * generations) == pytest.approx(10.0)


def test_a_few_requests_that_end_first_say_nothing_of_the_rate() -> None:
    rate = ServiceRate()
    rate.begin(0.0)
    rate.add_ended(1, 8, 4.0)
    rate.add_service(4.0)
    assert rate.wait_s(7, 8, 4.0) == pytest.approx(4.0)


def test_time_without_waiting_requests_does_not_count() -> None:
    rate = saturated(places=2, service_s=1.0, generations=20)
    rate.end(20.0)
    assert rate.wait_s(9, 2, 5000.0) == pytest.approx(5.0)
    rate.begin(9000.0)
    rate.add_ended(2, 2, 9001.0)
    assert rate.wait_s(9, 2, 9001.0) == pytest.approx(5.0)


def test_a_new_rate_takes_the_place_of_the_old_one() -> None:
    rate = saturated(places=4, service_s=1.0, generations=50)
    for number in range(1, 41):
        rate.add_ended(4, 4, 50 + number * 0.1)
        for _ in range(4):
            rate.add_service(0.1)
    assert rate.wait_s(39, 4, 54.0) == pytest.approx(1.0, rel=0.1)


def test_a_wait_grows_while_no_request_ends() -> None:
    rate = saturated(places=1, service_s=1.0, generations=50)
    waits = [rate.wait_s(0, 1, 50.0 + seconds) or 0 for seconds in (0, 10, 1000)]
    assert waits[0] == pytest.approx(1.0)
    assert waits[2] > 50
    assert waits == sorted(waits)


def test_what_was_measured_of_other_workers_is_forgotten() -> None:
    rate = saturated(places=1, service_s=1.0, generations=5)
    assert rate.wait_s(0, 1, 605.0) == pytest.approx(100, rel=0.5)
    rate.forget()
    assert rate.wait_s(0, 1, 605.0) == pytest.approx(1.0)
    assert not rate.is_measuring


@pytest.mark.parametrize(("wait_s", "header"), [(None, 1), (0.0, 1), (0.2, 1), (1.2, 2), (59.5, 60), (1e9, 60)])
def test_retry_after_is_whole_seconds_within_bounds(wait_s: float | None, header: int) -> None:
    assert retry_after(wait_s) == header
