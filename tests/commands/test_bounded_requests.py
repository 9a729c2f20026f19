"""The whole answer to a command is bounded in time, however it comes: head, body or the text of a refusal."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request

import pytest

from lmi_server.bench.server_metrics import fetch_text
from lmi_server.client.bounded_requests import is_same_server, open_within, read_whole
from lmi_server.client.server_calls import ServerCalls, UnreachableError, parse_headers
from lmi_server.commands.live import model_figures
from lmi_server.contract.errors import ConfigurationError

HEAD = b"HTTP/1.1 200 OK\r\n"


@contextlib.contextmanager
def dripping(at_once: bytes, piece: bytes) -> Iterator[str]:
    """Yield the URL of a server that answers with `at_once`, and then for a minute with `piece` every 50 ms."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def drip() -> None:
            with listener.accept()[0] as connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(at_once)
                for _ in range(1200):
                    connection.sendall(piece)
                    if ended.wait(0.05):
                        return

        dripped = threads.submit(drip)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            assert not dripped.done(), "the server was still at it"
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)  # without a request, accept would wait without end


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Yield the URL of a server that answers each request so, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def answer_all() -> None:
            while True:
                with listener.accept()[0] as connection:
                    if not connection.recv(65536):
                        return
                    connection.sendall(answer)

        threads.submit(answer_all)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            socket.create_connection(listener.getsockname()).close()


@pytest.mark.parametrize(
    ("at_once", "piece"),
    [
        (b"", b"H"),
        (HEAD, b"a"),
        (HEAD, b"a: b\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (HEAD + b"Content-Length: 1000000\r\n\r\n", b" "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0"),
        (b"HTTP/1.1 500 Oops\r\n\r\n", b" "),
    ],
    ids=["version", "header", "headers", "continue", "body", "chunks", "length of a chunk", "refusal"],
)
def test_an_answer_that_comes_bit_by_bit_is_none_within_the_timeout(at_once: bytes, piece: bytes) -> None:
    with dripping(at_once, piece) as url, pytest.raises(UnreachableError, match=f"{url} does not answer: timed out"):
        ServerCalls(url, {}).json("GET", "/", 1)


def test_a_table_of_models_waits_no_longer_for_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_figures, "_LIMIT_S", 1)
    with dripping(HEAD, b"a: b\r\n") as url, pytest.raises(UnreachableError, match="timed out"):
        model_figures.take_snapshot(ServerCalls(url, {}))


def test_a_redirect_begins_no_new_time() -> None:
    with dripping(HEAD, b"a") as url:
        to_it = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: %s/\r\n\r\n" % url.encode()
        with dripping(to_it, b"") as first, pytest.raises(TimeoutError):
            open_within(1, Request(first))


def test_a_redirect_leads_to_no_other_protocol() -> None:
    elsewhere = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: ftp://127.0.0.1:1/\r\n\r\n"
    with dripping(elsewhere, b"") as url, pytest.raises(OSError, match="unknown url type: ftp"):
        open_within(60, Request(url))


@pytest.mark.parametrize("place", [b"http://[::1/", b"http://.x/", b"http://%s/" % (b"a" * 64), b"http://\xff/"])
def test_a_redirect_to_what_is_no_url_is_no_answer(place: bytes) -> None:
    head = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: %s\r\n\r\n" % place
    with dripping(head, b"") as url, pytest.raises(UnreachableError, match=f"{url} does not answer: "):
        ServerCalls(url, {}).json("GET", "/", 60)


@pytest.mark.parametrize("length", [b"Content-Length: 1000000000000", b"Transfer-Encoding: chunked"])
def test_a_redirect_is_followed_before_its_body_comes(length: bytes) -> None:
    with dripping(HEAD + b"Content-Length: 2\r\n\r\n{}", b"") as url:
        to_it = b"HTTP/1.1 302 Found\r\n%s\r\nLocation: %s/\r\n\r\n1\r\n" % (length, url.encode())
        with dripping(to_it, b"") as first:
            assert ServerCalls(first, {}).json("GET", "/", 60) == {}


def test_a_redirect_in_a_circle_is_refused_on_one_line() -> None:
    head = b"HTTP/1.1 302 Found\r\nContent-Length: 1000\r\nLocation: /?a\r\n\r\n"
    with answering(head) as url, pytest.raises(ConfigurationError, match="infinite loop") as refusal:
        ServerCalls(url, {}).json("GET", "/", 60)
    assert "\n" not in str(refusal.value)


def redirect(place: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: {place}\r\n\r\n".encode()


def test_a_key_follows_no_redirect_to_another_server() -> None:
    with answering(HEAD + b"Content-Length: 2\r\n\r\n{}") as other, answering(redirect(f"{other}/a")) as url:
        assert ServerCalls(url, {}).json("GET", "/", 60) == {}
        refused = f"{url} does not answer: it leads to {other}/a, and headers go to no other server; give that URL"
        with pytest.raises(UnreachableError) as refusal:
            ServerCalls(url, {"x-api-key": "secret"}).json("GET", "/", 60)
        assert refusal.value.message == refused
        with pytest.raises(ConnectionError, match="headers go to no other server"):
            fetch_text(f"{url}/metrics", {"x-api-key": "secret"})


@contextlib.contextmanager
def answering_in_turn(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the host and port of a server that answers one request with each, and the requests."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def answer_all() -> None:
            for answer in answers:
                with listener.accept()[0] as connection:
                    asked.append(connection.recv(65536))
                    connection.sendall(answer)

        answered = threads.submit(answer_all)
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", asked
            answered.result(60)
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def test_a_key_follows_a_redirect_on_its_server() -> None:
    with answering_in_turn(redirect("/there"), HEAD + b"Content-Length: 2\r\n\r\n{}") as (place, asked):
        assert ServerCalls(f"http://{place}", {"x-api-key": "secret"}).json("GET", "/", 60) == {}
    assert asked[1].startswith(b"GET /there HTTP/1.1\r\n")
    assert b"\r\nX-Api-Key: secret\r\n" in asked[1]


def test_the_password_of_a_proxy_neither_follows_a_redirect_nor_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found = HEAD + b"Content-Length: 2\r\n\r\n{}"
    with (
        answering_in_turn(found) as (other, asked_there),
        answering_in_turn(redirect(f"http://{other}/there")) as (proxy, asked),
    ):
        monkeypatch.setenv("http_proxy", f"http://user:secret@{proxy}")
        assert ServerCalls("http://model.test", {}).json("GET", "/", 60) == {}
    assert asked[0].startswith(b"GET http://model.test:80/ HTTP/1.1\r\n")
    assert b"\r\nProxy-Authorization: Basic " in asked[0]
    assert asked_there[0].startswith(b"GET /there HTTP/1.1\r\n")
    assert b"proxy-authorization" not in asked_there[0].lower()


@pytest.mark.parametrize(
    ("url", "other", "may_follow"),
    [
        ("http://host/", "http://host:80/a", True),
        ("http://host/", "https://host/", True),
        ("http://HOST/", "http://host/", True),
        ("https://host/", "http://host/", False),
        ("http://host:8080/", "https://host/", False),
        ("http://host:8080/", "http://host:8081/", False),
        ("http://host/", "http://host.other/", False),
        ("http://host/", "http://host@other/", False),
        ("http://host/", "http://other\\@host/", False),
        ("http://host/", "http://other%23@host/", False),
        ("http://host/", "http://host:0/", False),
        ("http://[::1]:8080/", "http://[::1]:8080/a", True),
    ],
)
def test_which_redirects_stay_on_a_server(url: str, other: str, may_follow: bool) -> None:
    assert is_same_server(url, other) == may_follow


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://.x", "http://a:b", "http://a/b c", "http://a/\xfc", "http://a/\udcff"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="is no URL"):
        ServerCalls(url, {})


@pytest.mark.parametrize("header", ["x-key: \u6f22", "x-key: a\r\nx: b", "x-key: \udcff", "x-key: a\x00"])
def test_a_header_that_cannot_be_sent_is_refused_without_its_value(header: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        parse_headers([header])
    assert str(refusal.value) == 'the value of --header "x-key" is not allowed; allowed: one line in Latin-1'


@pytest.mark.parametrize("name", ["", " ", "\xfc", "a b", "a\nb"])
def test_the_name_of_a_header_is_a_token(name: str) -> None:
    with pytest.raises(ConfigurationError, match='allowed: "name: value"'):
        parse_headers([f"{name}: b"])


def test_without_a_limit_an_answer_is_waited_for() -> None:
    with dripping(HEAD + b"Content-Length: 20\r\n\r\n", b"a") as url, open_within(None, Request(url)) as answer:
        assert read_whole(answer) == b"a" * 20


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "http://h:x", "ftp://h", "http://"])
def test_what_is_no_url_is_refused_with_what_is_allowed(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"allowed: http://HOST:PORT, https://HOST:PORT") as error:
        ServerCalls(url, {})
    assert error.value.message.startswith(f"{url} is no URL")
