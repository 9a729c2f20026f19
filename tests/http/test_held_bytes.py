"""The memory of a front end under attack: what is decoded and what is kept counts until it is released."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from server_helpers import Server, connect, received, request, serving
from waiting import wait_until

from frontend.http.held_bytes import SMALL_BODY, HeldBytes, MemoryBudget
from lmi_server.contract.errors import NoRoomError

MIB = 1 << 20
NEXT = "x-next-token"
LIMIT = 64 * MIB
ALLOWED = LIMIT + 100 * MIB
SETTINGS = {"SERVING_MAX_BUFFERED_SIZE": str(LIMIT), "SERVING_ASYNC_JOBS_SIZE": str(LIMIT)}
TEXT = json.dumps(request("a", 1)).encode()


def bomb() -> bytes:
    """Return what compresses well; no process holds it that runs other tests."""
    return TEXT + b" " * 60_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    options = {"max_rolling_batch_size": 1, "job_queue_size": 2000, "libraries": ""}
    with serving(directory, variables=SETTINGS, **options) as server:
        server.invoke("a")
        yield server


def resident(server: Server) -> int:
    """Return the bytes of memory that the server has taken. The system drops and reads pages of files as it likes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@contextlib.contextmanager
def watched(server: Server) -> Iterator[None]:
    """Check the memory of the server all the time, and that it has gone back at the end."""
    before, peak, ended = resident(server), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            peak[0] = max(peak[0], resident(server))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
        assert server.http.get("/ping").status_code == 200
    finally:
        ended.set()
        watcher.join()
    assert peak[0] - before < ALLOWED
    wait_until(lambda: resident(server) < before + 40 * MIB, "the memory is given back")


@contextlib.contextmanager
def held_up(server: Server) -> Iterator[None]:
    """Have one request take the only place of the worker, so that all others wait."""
    endless = json.dumps(request("a", 10_000_000, stream=True)).encode()
    head = f"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-length: {len(endless)}\r\n\r\n".encode()
    with connect(server, head + endless) as connection:
        received(connection, b"token")
        yield


def sent(server: Server, body: bytes, **headers: str) -> http.client.HTTPConnection:
    """Send a request; the connection is closed at the end of the test."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    _OPEN.append(connection)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", "/invocations", body, {"content-type": "application/json", **named})
    return connection


def deflated_raw(data: bytes) -> bytes:
    return zlib.compress(data)[2:-4]


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [
        ("gzip", gzip.compress),
        pytest.param("deflate", zlib.compress, marks=pytest.mark.slow),
        pytest.param("deflate", deflated_raw, marks=pytest.mark.slow),
        pytest.param("gzip, gzip", lambda data: gzip.compress(gzip.compress(data)), marks=pytest.mark.slow),
    ],
    ids=["gzip", "deflate", "raw", "twice"],
)
def test_what_is_decoded_counts(server: Server, encoding: str, encode: Callable[[bytes], bytes]) -> None:
    body = encode(bomb())
    assert len(body) < 70_000
    with watched(server):
        with held_up(server):
            connections = [sent(server, body, content_encoding=encoding) for _ in range(40)]
            wait_until(lambda: refused(server, 503) >= 39, "all but one are refused")
        answers = [connection.getresponse() for connection in connections]
        texts = [answer.read() for answer in answers]
        assert Counter(answer.status for answer in answers)[503] >= 39
        full = next(text for text, answer in zip(texts, answers, strict=True) if answer.status == 503)
        assert f"The server holds max_buffered_size={LIMIT} bytes of requests; send this one later" in full.decode()
        for connection in connections:
            connection.close()


def refused(server: Server, code: int) -> float:
    """Return how many requests have got this status since the last call for it."""
    total = sum(
        float(line.rpartition(" ")[2])
        for line in server.http.get("/metrics").text.splitlines()
        if line.startswith(f'lmi_requests_total{{code="{code}"')
    )
    return total - _SEEN.get(code, 0.0)


_SEEN: dict[int, float] = {}
_OPEN: list[http.client.HTTPConnection] = []


@pytest.fixture(autouse=True)
def clients(server: Server) -> Iterator[None]:
    """Note what the server has refused before a test, and close the connections of the test behind it."""
    _SEEN[503] = 0.0
    _SEEN[503] = refused(server, 503)
    yield
    while _OPEN:
        _OPEN.pop().close()


def test_what_is_decoded_for_a_client_that_is_gone_counts(server: Server) -> None:
    body = gzip.compress(bomb())
    with watched(server), held_up(server):
        for _ in range(40):
            sent(server, body, content_encoding="gzip").close()
        server.until("lmi_queue_depth", 0)


@pytest.mark.slow
def test_bodies_of_jobs_count_until_the_jobs_have_ended(server: Server) -> None:
    body = TEXT + b" " * 30_000_000
    tokens = []
    with watched(server), held_up(server):
        for _ in range(40):
            with contextlib.suppress(ConnectionError):  # refused while it was sent
                answer = sent(server, body, x_synchronous="false").getresponse()
                answer.read()
                if answer.status == 200:
                    tokens.append(answer.headers[NEXT])
        assert len(tokens) == 2
        for token in tokens:
            assert server.http.delete("/invocations", headers={"x-starting-token": token}).status_code == 200
        server.until("lmi_queue_depth", 0)
        again = server.http.post("/invocations", content=body, headers={"x-synchronous": "false"})
        assert again.status_code == 200, "there is room again"
        server.http.delete("/invocations", headers={"x-starting-token": again.headers[NEXT]})


@pytest.mark.slow
def test_an_answer_that_grows_beyond_its_memory_is_given_up(server: Server) -> None:
    body = json.dumps(request("a" * MIB, 300, stream=True)).encode()
    with watched(server):
        token = server.http.post("/invocations", content=body, headers={"x-synchronous": "false"}).headers[NEXT]
        pages: list[httpx.Response] = []

        def has_ended() -> bool:
            """Ask for the beginning alone: there may be much of it."""
            asked = {"x-starting-token": token, "x-max-items": "1"}
            pages[:] = [server.http.post("/invocations", headers=asked)]
            return pages[0].status_code == 503

        wait_until(has_ended, "the answer is given up")
        rest = server.http.post("/invocations", headers={"x-starting-token": token})
        message = rest.json()["message"]
        assert f"async_jobs_size={LIMIT} bytes; read or end some jobs, or raise it" in message
        assert server.invoke("a").status_code == 200, "the worker is free"
        server.http.delete("/invocations", headers={"x-starting-token": token})


@pytest.mark.slow
def test_long_heads_count(server: Server) -> None:
    with watched(server), held_up(server):
        connections = [sent(server, TEXT, x_long="a" * 60_000) for _ in range(900)]
        wait_until(lambda: refused(server, 503) > 100, "some are refused")
        for connection in connections:
            connection.close()
        server.until("lmi_queue_depth", 0)


@pytest.mark.parametrize(
    "start",
    [
        "GET /ping HTTP/1.1\r\nhost: x\r\nhost: y",
        "GET /ping HTTP/2.0\r\nhost: x",
        "GET /%zz/\x7f HTTP/1.1\r\nhost: x",
        "GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade\r\nupgrade: websocket",
        "CONNECT x:80 HTTP/1.1\r\nhost: x",
    ],
    ids=["two hosts", "other version", "no URL", "upgrade", "tunnel"],
)
def test_nothing_is_held_of_a_head_that_has_been_answered(server: Server, start: str) -> None:
    data = f"{start}\r\nx-long: {'a' * 60_000}\r\n\r\n".encode()
    for _ in range(700):
        with connect(server, data) as connection:
            received(connection, b"}")
    large = server.http.post("/invocations", content=TEXT + b" " * MIB)
    assert large.status_code == 200, large.text


def test_heads_count_before_they_have_an_end(server: Server) -> None:
    with watched(server):
        data = b"GET /ping HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 60_000
        connections = [connect(server, data) for _ in range(700)]
        wait_until(lambda: refused(server, 503) > 100, "some are refused")
        for connection in connections:
            connection.close()
    wait_until(
        lambda: server.http.post("/invocations", content=TEXT + b" " * MIB).status_code == 200, "all is released"
    )


@pytest.mark.slow
def test_a_connection_may_send_any_number_of_requests_ahead(server: Server) -> None:
    """Only those count that have no answer yet."""
    body = TEXT + b" " * (10 * MIB)
    one = b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    with watched(server), socket.create_connection(("127.0.0.1", server.port), timeout=120) as connection:
        sender = threading.Thread(target=lambda: connection.sendall(one * 12))
        sender.start()
        data = b""
        deadline = time.monotonic() + 120
        while data.count(b"HTTP/1.1 200") < 12 and time.monotonic() < deadline and (part := connection.recv(65536)):
            data += part
        sender.join()
    assert (data.count(b"HTTP/1.1 200"), data.count(b"HTTP/1.1")) == (12, 12)


# --- the budget itself ---


def test_small_bodies_have_room_beyond_the_limit_but_not_without_end() -> None:
    budget = MemoryBudget(1000, "full")
    large, small = HeldBytes(budget), HeldBytes(budget)
    assert large.add(1000)
    assert not large.add(SMALL_BODY)
    assert small.add(SMALL_BODY)
    held = [HeldBytes(budget) for _ in range(1000)]
    found = [one.add(SMALL_BODY) for one in held]
    assert (found[0], found[-1]) == (True, False)
    for one in (large, small, *held):
        one.release()
    assert budget.used == 0


def test_what_finds_no_room_is_not_counted() -> None:
    budget = MemoryBudget(1000, "full")
    held = HeldBytes(budget)
    held.reserve(600)
    with pytest.raises(NoRoomError, match="full"):
        held.another().reserve(SMALL_BODY + 1)
    assert (held.size, budget.used) == (600, 600)
