from __future__ import annotations

import pytest

from frontend.inference import model_named_in, parse_priority, priority_named_in
from lmi_server.contract.errors import RequestError


def test_the_body_names_the_model() -> None:
    assert model_named_in(b'{"model": "first"}') == "first"
    assert model_named_in(b'\xef\xbb\xbf{"x": [1], "model": "alias"}') == "alias"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"model": 1}', b'{"model": "\xff"}'])
def test_a_body_that_names_none(body: bytes) -> None:
    assert model_named_in(body) is None


def test_a_body_that_is_nested_too_deeply() -> None:
    with pytest.raises(RequestError, match="nested too deeply"):
        model_named_in(b'{"x": ' + b"[" * 100_000)


def test_the_priority_header() -> None:
    assert parse_priority(None) == 3
    assert parse_priority("-5") == -5
    assert parse_priority("2147483647") == 2**31 - 1


@pytest.mark.parametrize("value", ["soon", "", "1.0", "1_000", " 1", "+1", "\u0663", "2147483648", "9" * 5000])
def test_a_priority_header_that_is_no_integer(value: str) -> None:
    with pytest.raises(RequestError, match=r"x-priority is '.*'; it takes an integer"):
        parse_priority(value)


def test_the_priority_in_the_body() -> None:
    assert priority_named_in(b'{"priority": -7, "messages": []}', 3) == -7
    assert priority_named_in(b'{"messages": [{"content": "\\"priority\\": 1"}]}', 3) == 3


@pytest.mark.parametrize("value", [b"null", b'"1"', b"1.5", b"2147483648", b"1", b"[" * 100_000])
def test_a_priority_in_a_body_that_the_worker_refuses_changes_nothing(value: bytes) -> None:
    body = b'{"priority": %b' % value if value == b"1" else b'{"priority": %b}' % value
    assert priority_named_in(body, 5) == 5
