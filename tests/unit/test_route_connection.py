"""A connection to a server: whatever pieces an answer comes in, it ends once, and nothing of it goes to another."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from lmi_server.contract.protocol import Input
from lmi_server.route.connection import Connection, Connections, Headers, Peer
from lmi_server.route.exchange import UsageMeter
from lmi_server.route.fleet import _Listed, _sorted_models
from lmi_server.route.headers import request_lines

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nx-trailer: 1\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\nhello"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


class FakeTransport:
    """A transport that is open until it is closed."""

    def __init__(self) -> None:
        self.is_open = True
        self.written = b""
        self.unsent = 0

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return not self.is_open

    def abort(self) -> None:
        self.is_open = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Recorder:
    """Records what a receiver gets."""

    def __init__(self) -> None:
        self.body = b""
        self.heads: list[int] = []
        self.ends: list[str] = []

    def on_head(self, status: int, headers: Headers, length: int | None) -> None:
        self.heads.append(status)

    def on_body(self, data: bytes) -> None:
        assert not self.ends
        self.body += data

    def on_end(self) -> None:
        self.ends.append("whole")

    def on_break(self, reason: str) -> None:
        self.ends.append(reason)


def connected() -> tuple[Connections, Connection, FakeTransport]:
    connections = Connections(Peer("127.0.0.1", 1))
    connection, transport = Connection(connections), FakeTransport()
    connection.connection_made(cast(Any, transport))
    return connections, connection, transport


def feed(data: bytes, chance: random.Random) -> tuple[Connections, Recorder]:
    """Return what becomes of an answer in random pieces, and of the end of the connection."""
    connections, connection, transport = connected()
    recorder = Recorder()
    connection.send(b"POST / HTTP/1.1\r\n\r\n", b"", recorder)
    while data and transport.is_open:
        size = chance.randint(1, chance.choice((1, 3, len(data))))
        connection.data_received(data[:size])
        data = data[size:]
    if not transport.is_open or not recorder.ends:
        connection.connection_lost(None)
    return connections, recorder


@pytest.mark.parametrize("answer", [WHOLE, CHUNKED, UNTIL_CLOSE, INTERIM + WHOLE, INTERIM * 3 + CHUNKED])
def test_an_answer_is_the_same_in_any_pieces(answer: bytes) -> None:
    for seed in range(100):
        connections, recorder = feed(answer, random.Random(seed))
        assert (recorder.heads, recorder.body, recorder.ends) == ([200], b"hello", ["whole"])
        assert (connections.idle() is None) == (answer == UNTIL_CLOSE)


@pytest.mark.parametrize("answer", [WHOLE, CHUNKED, INTERIM + WHOLE])
def test_half_an_answer_ends_once(answer: bytes) -> None:
    for cut in range(len(answer)):
        connections, recorder = feed(answer[:cut], random.Random(cut))
        assert len(recorder.ends) == 1
        assert recorder.ends != ["whole"]
        assert connections.idle() is None


def test_any_bytes_end_once() -> None:
    for seed in range(500):
        chance = random.Random(seed)
        answer = bytearray(chance.choice((WHOLE, CHUNKED, INTERIM + WHOLE)))
        for _ in range(chance.randint(1, 6)):
            answer[chance.randrange(len(answer))] = chance.randrange(256)
        _, recorder = feed(bytes(answer), chance)
        assert len(recorder.ends) == 1
        assert len(recorder.heads) <= 1


@pytest.mark.parametrize("more", [WHOLE, b"x", b"\r\n\r\nHTTP/1.1 500 X\r\n\r\n"])
def test_a_connection_with_more_than_an_answer_is_not_used_again(more: bytes) -> None:
    connections, connection, transport = connected()
    recorder = Recorder()
    connection.send(b"", b"", recorder)
    connection.data_received(WHOLE + more)
    assert recorder.body == b"hello"
    assert connections.idle() is None or not transport.is_open
    assert not transport.is_open


@pytest.mark.parametrize("more", [b"\r\n", b"x", b"\x00"])
def test_what_follows_the_last_answer_of_a_connection_spoils_nothing(more: bytes) -> None:
    connections, connection, transport = connected()
    recorder = Recorder()
    connection.send(b"", b"", recorder)
    connection.data_received(WHOLE.replace(b"\r\n", b"\r\nconnection: close\r\n", 1) + more)
    assert (recorder.body, recorder.ends) == (b"hello", ["whole"])
    assert not transport.is_open
    assert connections.idle() is None


@pytest.mark.parametrize("status", [b"000", b"099", b"600", b"999"])
def test_what_is_no_status_of_http_does_not_go_on(status: bytes) -> None:
    _, recorder = feed(WHOLE.replace(b"200", status, 1), random.Random(0))
    assert not recorder.heads
    assert len(recorder.ends) == 1
    assert recorder.ends[0].startswith("answered with ")


def test_the_connections_of_a_server_that_is_gone_close_after_their_answers() -> None:
    connections, connection, transport = connected()
    recorder = Recorder()
    connection.send(b"", b"", recorder)
    connections.retire()
    assert transport.is_open
    connection.data_received(WHOLE)
    assert recorder.ends == ["whole"]
    assert not transport.is_open


def test_an_answer_before_the_end_of_its_request_ends_the_connection() -> None:
    connections, connection, transport = connected()
    recorder = Recorder()
    connection.send(b"POST / HTTP/1.1\r\n\r\n", b"", recorder)
    transport.unsent = 9
    connection.data_received(WHOLE)
    assert recorder.ends == ["whole"]
    assert not transport.is_open
    assert connections.idle() is None


def test_what_comes_unasked_closes_an_idle_connection() -> None:
    connections, connection, transport = connected()
    connection.send(b"", b"", Recorder())
    connection.data_received(WHOLE)
    connection.data_received(WHOLE)
    assert not transport.is_open
    assert connections.idle() is None


@pytest.mark.parametrize("endless", [b"x-trailer: 1\r\n" * 100, b"x" * 4000], ids=["many", "one"])
def test_trailers_without_end_are_bounded(endless: bytes) -> None:
    _, connection, transport = connected()
    recorder = Recorder()
    connection.send(b"", b"", recorder)
    connection.data_received(CHUNKED[:-2])
    for _ in range(200):
        if not transport.is_closing():
            connection.data_received(endless)
    assert transport.is_closing()
    assert recorder.ends == ["sent more than 131072 bytes of trailers"]


def test_a_long_body_in_small_chunks_is_no_trailer() -> None:
    _, connection, transport = connected()
    connection.send(b"", b"", Recorder())
    connection.data_received(CHUNKED[: CHUNKED.index(b"2\r\n")])
    for _ in range(20_000):
        connection.data_received(b"1;extension=1\r\n")
        connection.data_received(b"x\r\n")
    assert not transport.is_closing()


def test_a_head_without_end_is_bounded() -> None:
    _, connection, transport = connected()
    recorder = Recorder()
    connection.send(b"", b"", recorder)
    connection.data_received(b"HTTP/1.1 200 OK\r\nx: ")
    for _ in range(10):
        if transport.is_open:
            connection.data_received(b"a" * 65536)
    assert len(recorder.ends) == 1
    assert "head of more than" in recorder.ends[0]


@pytest.mark.parametrize(
    "attributes", ["a=1", "x y=1", "content-length=9", "host=evil", "a:b=1", "=1", ";;", "transfer-encoding=chunked"]
)
def test_no_attribute_becomes_a_header(attributes: str) -> None:
    names = [part.partition("=")[0].strip() for part in attributes.split(";") if "=" in part]
    properties = {"content-type": "application/json", **{name.lower(): "1" for name in names}}
    listed = "\n".join(["Content-Type", "X-Amzn-SageMaker-Custom-Attributes", *names])
    request = Input("completions", properties, [], "id", names=listed, custom_attributes=attributes)
    lines = request_lines(request, None).decode().split("\r\n")
    found = {line.partition(":")[0] for line in lines if line}
    assert found == {"content-type", "x-amzn-sagemaker-custom-attributes", "x-request-id", "via", "forwarded"}


@pytest.mark.parametrize("value", ["a\r\nx: y", "a\nb", "\x00", "a\x7f"])
def test_no_value_ends_a_line(value: str) -> None:
    request = Input("completions", {"x-a": value, "x-b": "1"}, [], value, custom_attributes=value)
    lines = request_lines(request, "key").split(b"\r\n")
    assert [line.partition(b":")[0] for line in lines] == [b"x-b", b"authorization", b"via", b"forwarded", b""]


def test_texts_of_an_answer_count_nothing() -> None:
    meter = UsageMeter(400)
    meter.add(rb'data: {"choices": [{"delta": {"content": "\"usage\": {\"completion_tokens\": 999}"}}]}' + b"\n\n")
    assert meter.summary() is None
    assert meter.tokens(None, failed=False) == 101
    meter.add(b'data: {"usage": {"prompt_tokens": 3, "completion_tok')
    meter.add(b'ens": 4, "prompt_tokens_details": {"cached_tokens": 9}}}\n\n')
    summary = meter.summary()
    assert summary is not None
    assert (summary.prompt_tokens, summary.output_tokens, summary.cached_tokens) == (3, 4, 3)


def test_models_and_adapters_are_told_apart() -> None:
    listed = [_Listed("a"), _Listed("b", "a"), _Listed("c", "b"), _Listed("d", "d"), _Listed("e", "gone")]
    assert _sorted_models([*listed, _Listed(""), _Listed("x" * 300), _Listed("x\ny")]) == {
        "a": frozenset({"b"}),
        "c": frozenset(),
        "d": frozenset(),
        "e": frozenset(),
    }
    assert _sorted_models([_Listed("a", "b"), _Listed("b", "a")]) == {"a": frozenset(), "b": frozenset()}
