from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any, cast
from uuid import RFC_4122, UUID

import pytest

from frontend.http.responses import new_request_id
from frontend.relay.request import RelayedRequest, model_and_priority, parse_priority
from frontend.relay.response import RelayedResponse
from lmi_server.contract.errors import RequestError


def test_the_body_names_the_model() -> None:
    assert model_and_priority(b'{"model": "first"}') == ("first", None)
    assert model_and_priority(b'\xef\xbb\xbf{"x": [1], "model": "alias"}') == ("alias", None)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"model": 1}', b'{"model": "\xff"}'])
def test_a_body_that_names_none(body: bytes) -> None:
    assert model_and_priority(body) == (None, None)


def test_a_body_that_is_nested_too_deeply() -> None:
    with pytest.raises(RequestError, match="nested too deeply"):
        model_and_priority(b'{"x": ' + b"[" * 100_000)


def test_the_priority_header() -> None:
    assert parse_priority("-5") == -5
    assert parse_priority("2147483647") == 2**31 - 1


@pytest.mark.parametrize("value", ["soon", "", "1.0", "1_000", " 1", "+1", "\u0663", "2147483648", "9" * 5000])
def test_a_priority_header_that_is_no_integer(value: str) -> None:
    with pytest.raises(RequestError, match=r"x-priority is '.*'; it takes an integer"):
        parse_priority(value)


def priority(body: bytes, header: bytes | None) -> int:
    scope = {
        "headers": [] if header is None else [(b"x-priority", header)],
        "extensions": {"lmi_server.connection": None, "lmi_server.header_names": [b"X-Priority"]},
    }
    return RelayedRequest("chat/completions", scope, cast(Any, None), "x-request-id").priority(body)


def test_the_priority_in_the_body() -> None:
    assert priority(b"{}", None) == 3
    assert priority(b'{"priority": -7, "messages": []}', b"3") == -7
    assert priority(b'{"messages": [{"content": "\\"priority\\": 1"}]}', b"3") == 3
    assert model_and_priority(b'{"priority": -7, "model": 1}') == (None, -7)


@pytest.mark.parametrize("value", [b"null", b"true", b'"1"', b"1.5", b"2147483648", b"1", b"[" * 100_000])
def test_a_priority_in_a_body_that_the_worker_refuses_changes_nothing(value: bytes) -> None:
    body = b'{"priority": %b' % value if value == b"1" else b'{"priority": %b}' % value
    assert priority(body, b"5") == 5


class RecordingConnection:
    def __init__(self) -> None:
        self.written: list[tuple[int, bytes, bytes]] = []

    def write_whole(self, send: object, status: int, head: bytes, body: bytes) -> bool:
        self.written.append((status, head, body))
        return True


def answer(headers: list[tuple[str, str]], body: bytes = b"{}") -> tuple[RecordingConnection, list[Any]]:
    """Return what a connection was asked to write at once, and the messages that uvicorn got."""
    connection, messages = RecordingConnection(), []

    async def send(message: Any) -> None:
        messages.append(message)

    response = RelayedResponse(cast(Any, connection), send, "id-1", [(b"pragma", b"no-cache")])
    asyncio.run(response.whole(200, headers, body))
    return connection, messages


def test_a_usual_answer_is_written_at_once() -> None:
    connection, messages = answer([("Content-Type", "text/plain"), ("X-Request-Id", "the handler's"), ("x-a", "é")])
    head = (
        b"content-type: text/plain\r\nx-a: \xe9\r\ncontent-length: 2\r\nx-request-id: id-1\r\npragma: no-cache\r\n\r\n"
    )
    assert connection.written == [(200, head, b"{}")]
    assert messages == []


@pytest.mark.parametrize(
    "header", [("x-a", "1\r\nx-b: 2"), ("x a", "1"), ("x-a\n", "1"), ("Connection", "close"), ("content-length", "1")]
)
def test_uvicorn_checks_headers_that_change_how_an_answer_is_read(header: tuple[str, str]) -> None:
    connection, messages = answer([header])
    assert connection.written == []
    assert tuple(part.encode() for part in header) in messages[0]["headers"]


def test_a_long_answer_is_written_in_parts_as_the_client_reads() -> None:
    connection, messages = answer([], bytes(600 * 1024))
    assert connection.written == []
    assert b"".join(message["body"] for message in messages[1:]) == bytes(600 * 1024)
    assert len(messages) == 4


def test_an_id_is_a_random_uuid() -> None:
    texts = {new_request_id() for _ in range(1000)}
    assert len(texts) == 1000
    for text in texts:
        parsed = UUID(text)
        assert (str(parsed), parsed.version, parsed.variant) == (text, 4, RFC_4122)


def test_wrong_values_of_model_and_priority_make_no_objects() -> None:
    many = b"[" + b",".join([b"[]"] * 100_000) + b"]"
    body = b'{"model": ' + many + b', "priority": ' + many + b"}"
    tracemalloc.start()
    try:
        assert model_and_priority(body) == (None, None)
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()
