"""What a key may have, at any order of requests and times."""

from __future__ import annotations

import random

import pytest

from lmi_server.contract.errors import KeyBusyError, PermissionDeniedError
from lmi_server.route.limits import Accounts, KeyLimits

DAY, MONTH = "2026-11-27", "2026-12-01"
KEY = b"digest"


def accounts(**limits: int | tuple[str, ...]) -> Accounts:
    found = Accounts()
    found.replace({KEY: KeyLimits(name="a", **limits)}, 0.0)  # type: ignore[arg-type]
    return found


def admits(found: Accounts, now: float, day: str = DAY, name: str = "m") -> bool:
    try:
        found.admit(KEY, [name], now, day)
    except KeyBusyError as error:
        return error.retry_after not in range(1, 3601)
    return True


def test_a_key_without_an_account_has_no_limits() -> None:
    assert accounts(requests_per_minute=1).admit(b"", ["m"], 0.0, DAY) is None


@pytest.mark.parametrize("seed", range(20))
def test_no_minute_has_more_than_twice_the_requests(seed: int) -> None:
    """A bucket that is full at the start of a minute is emptied in it, and gains as much."""
    chance = random.Random(seed)
    limit = chance.randint(1, 20)
    found = accounts(requests_per_minute=limit)
    now, admitted = 0.0, []
    for _ in range(400):
        now += chance.expovariate(chance.choice((0.1, 1.0, 10.0)))
        if admits(found, now):
            admitted.append(now)
    for begin in admitted:
        assert len([at for at in admitted if begin <= at < begin + 60]) <= 2 * limit
    assert admitted


def test_time_that_goes_back_gives_nothing() -> None:
    found = accounts(requests_per_minute=1)
    assert admits(found, 100.0)
    assert not admits(found, 0.0)
    assert not admits(found, 100.0)
    assert admits(found, 161.0)


def test_tokens_are_counted_when_they_are_known() -> None:
    found = accounts(tokens_per_minute=60)
    assert admits(found, 0.0)
    found.count(KEY, 120, 0.0, DAY)
    assert not admits(found, 59.0)
    assert admits(found, 62.0)
    found.count(KEY, -5, 62.0, DAY)
    found.count(b"other", 5, 62.0, DAY)


def test_budgets_end_with_their_day_and_month() -> None:
    found = accounts(tokens_per_day=10, tokens_per_month=25)
    found.count(KEY, 10, 0.0, DAY)
    assert not admits(found, 0.0)
    assert admits(found, 0.0, "2026-11-28")
    found.count(KEY, 15, 0.0, "2026-11-28")
    assert not admits(found, 0.0, "2026-11-29")
    assert admits(found, 0.0, MONTH)


def test_what_was_spent_survives_another_file_and_another_process() -> None:
    found = accounts(tokens_per_day=10)
    found.count(KEY, 9, 0.0, DAY)
    found.replace({b"renewed": KeyLimits(name="a", tokens_per_day=20)}, 0.0)
    found.count(b"renewed", 9, 0.0, DAY)
    other = accounts(tokens_per_day=18)
    other.restore(found.usage_by_key())
    assert not admits(other, 0.0)
    with pytest.raises(KeyError):
        other.restore({"a": {}})


def test_models_are_patterns_and_say_no_more() -> None:
    found = accounts(models=("qwen-*", "llama"))
    assert admits(found, 0.0, name="qwen-[x]")
    for name in ("qwen", "LLAMA", "", "x" * 5000):
        with pytest.raises(PermissionDeniedError) as caught:
            found.admit(KEY, [name], 0.0, DAY)
        assert len(caught.value.message) < 300


def test_an_account_stays_through_the_same_file() -> None:
    found = accounts(requests_per_minute=1)
    assert admits(found, 0.0)
    found.replace({KEY: KeyLimits(name="a", requests_per_minute=1)}, 1.0)
    assert not admits(found, 1.0)
