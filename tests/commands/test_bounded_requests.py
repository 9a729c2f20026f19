"""The whole answer to a command is bounded in time, however it comes: head, body or the text of a refusal."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request

import pytest

from lmi_server.client.bounded_requests import open_within, read_whole
from lmi_server.client.server_calls import ServerCalls, UnreachableError
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


def test_without_a_limit_an_answer_is_waited_for() -> None:
    with dripping(HEAD + b"Content-Length: 20\r\n\r\n", b"a") as url, open_within(None, Request(url)) as answer:
        assert read_whole(answer) == b"a" * 20


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "http://h:x", "ftp://h", "http://"])
def test_what_is_no_url_is_refused_with_what_is_allowed(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"allowed: http://HOST:PORT, https://HOST:PORT") as error:
        ServerCalls(url, {})
    assert error.value.message.startswith(f"{url} is no URL")
