"""What an exception says of memory, whatever the user's code has made of it."""

from __future__ import annotations

import pytest

from lmi_server.contract.errors import describe, is_out_of_memory


def raised_from(first: BaseException, count: int) -> BaseException:
    """Return the last of so many exceptions, each raised from the one before."""
    error = first
    for _ in range(count):
        following = RuntimeError("it failed")
        following.__cause__ = error
        error = following
    return error


@pytest.mark.parametrize("first", [MemoryError(), RuntimeError("CUDA error: out of memory")], ids=["host", "device"])
def test_a_lack_of_memory_is_found_among_the_causes(first: BaseException) -> None:
    assert is_out_of_memory(first)
    assert is_out_of_memory(raised_from(first, 10))
    assert not is_out_of_memory(raised_from(ValueError(), 10))


def test_causes_are_followed_up_to_a_bound() -> None:
    error = RuntimeError()
    error.__cause__ = error
    assert not is_out_of_memory(error)
    asked = []

    class SlowError(Exception):
        def __str__(self) -> str:
            asked.append(self)
            return "it failed"

    last: BaseException = SlowError()
    for _ in range(5000):
        following = SlowError()
        following.__cause__ = last
        last = following
    assert not is_out_of_memory(last)
    assert len(asked) < 100


def test_causes_that_a_property_makes_are_not_followed() -> None:
    class EndlessError(Exception):
        @property
        def __cause__(self) -> BaseException:  # type: ignore[override]
            return EndlessError()

    assert not is_out_of_memory(EndlessError())


def test_a_message_of_a_class_of_its_own_is_a_plain_one() -> None:
    class Text(str):
        def __contains__(self, other: object) -> bool:
            raise ValueError

        def strip(self, characters: str | None = None) -> str:
            raise ValueError

    class SpeakingError(Exception):
        def __str__(self) -> str:
            return Text(" it failed ")

    assert not is_out_of_memory(SpeakingError())
    assert describe(SpeakingError()) == "SpeakingError: it failed"


def test_a_lack_of_memory_is_found_whatever_an_exception_says_its_class_is() -> None:
    class BrokenError(Exception):
        @property
        def __class__(self) -> type[Exception]:  # type: ignore[override]
            raise ValueError

    error = BrokenError("x")
    assert not is_out_of_memory(error)
    error.__cause__ = MemoryError()
    assert is_out_of_memory(error)
