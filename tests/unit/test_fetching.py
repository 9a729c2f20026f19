"""What is fetched by URL: no connection to a private address, and no more bytes and seconds than the limits."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lmi_server.media import public_addresses
from lmi_server.media.fetching import fetch_bytes
from lmi_server.media.public_addresses import PrivateAddressError, is_public

HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"


@contextmanager
def site(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the URL of a server that answers one request."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/image"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(60)


def forever(connection: socket.socket, piece: bytes, pause: float) -> None:
    """Send until the client has gone."""
    while True:
        connection.sendall(piece)
        time.sleep(pause)


def test_a_public_file_is_returned() -> None:
    with site(lambda connection: connection.sendall(HEAD + b"picture")) as url:
        assert fetch_bytes(url, private=True) == b"picture"


def test_a_file_whose_end_is_missing_is_an_error() -> None:
    head = HEAD.replace(b"\r\n\r\n", b"\r\ncontent-length: 9\r\n\r\n")
    with (
        site(lambda connection: connection.sendall(head + b"picture")) as url,
        pytest.raises(OSError, match="the connection ended 2 bytes before the end of the answer"),
    ):
        fetch_bytes(url, private=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "2130706433"])
def test_an_open_and_a_closed_private_port_look_the_same(host: str) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener, socket.socket() as closed:
        closed.bind(("0.0.0.0", 0))  # it does not listen, and no other program gets the port
        listener.setblocking(False)
        errors = set()
        for port in (listener.getsockname()[1], closed.getsockname()[1]):
            with pytest.raises(PrivateAddressError) as error:
                fetch_bytes(f"http://{host}:{port}/")
            errors.add(str(error.value))
        assert len(errors) == 1
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_no_more_is_read_than_the_largest_file() -> None:
    with (
        site(lambda connection: forever(connection, HEAD + bytes(1 << 20), 0)) as url,
        pytest.raises(ValueError, match=r"is larger than 2 MiB"),
    ):
        fetch_bytes(url, private=True, max_bytes=2 << 20)


@pytest.mark.parametrize("start", [b"", HEAD, HEAD.replace(b"\r\n\r\n", b"\r\ncontent-length: 999999\r\n\r\n")])
def test_a_byte_now_and_then_is_no_answer(start: bytes) -> None:
    """Neither in the head nor in the body, whether its length is known or not."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(start or b"HTTP/1.1 200 OK\r\nx: ")
        forever(connection, b"x", 0.05)

    with site(answer) as url, pytest.raises(TimeoutError, match=r"did not arrive within 0\.5 seconds"):
        fetch_bytes(url, private=True, limit_s=0.5)


@pytest.mark.parametrize("address", ["::127.0.0.1", "fec0::1", "64:ff9b:1::7f00:1", "::ffff:0:10.0.0.1", "5f00::1"])
def test_reserved_addresses_are_not_public(address: str) -> None:
    """Old forms of IPv4 addresses and of private networks, which some systems still route."""
    assert not is_public(address)


@pytest.mark.parametrize("url", ["http://one.com:x.two.com:80/", "http://one.com:80:x.two.com/", "http://a@one.com/"])
def test_the_host_that_is_checked_is_the_one_that_is_connected_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connected(place: tuple[str, int]) -> object:
        raise AssertionError(place)

    monkeypatch.setattr(public_addresses, "_addresses", connected)
    with pytest.raises(ValueError, match=r"option\.allowed_media_domains names others"):
        fetch_bytes(url, hosts=["one.com"])


def test_a_host_may_have_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def connected(place: tuple[str, int]) -> object:
        raise PrivateAddressError(str(place))

    monkeypatch.setattr(public_addresses, "_addresses", connected)
    for url, host in (("http://One.com:81/", "one.com"), ("http://[2001::1]:81/", "2001::1")):
        with pytest.raises(PrivateAddressError, match="81"):
            fetch_bytes(url, hosts=[host])
