"""What clients may take of a server: time, connections, memory; and what happens to those that leave half-way."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from chaos_clients import Answers
from server_helpers import LIMIT_S, Server, connect, raw_request, received, request, serving
from waiting import wait_until

MIB = 1 << 20
SETTINGS = {
    "SERVING_REQUEST_HEAD_TIMEOUT": "1",
    "SERVING_REQUEST_BODY_TIMEOUT": "1",
    "SERVING_MIN_TRANSFER_RATE": "30",
    "SERVING_MAX_BUFFERED_SIZE": str(70 * MIB),
    "SERVING_MAX_UNREAD_SIZE": str(45 * MIB),
    "SERVING_MAX_CONNECTIONS": "30",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(
        tmp_path_factory.mktemp("server"),
        max_rolling_batch_size=4,
        max_worker_memory_mb=300,
        variables=SETTINGS,
        libraries="",
    ) as server:
        server.invoke("a")
        yield server


def exchanged(server: Server, sent: bytes) -> bytes:
    with connect(server, sent) as connection:
        return received(connection)


def head(length: int, *headers: str) -> bytes:
    lines = ["POST /invocations HTTP/1.1", "host: x", f"content-length: {length}", *headers]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


CHUNKED = b"POST /invocations HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(body: bytes, more: bytes) -> bytes:
    return b"%b%x\r\n%b\r\n0\r\n%b" % (CHUNKED, len(body), body, more)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", b""),
        (b"POST /invocations HTTP/1.1\r\nhost: x\r\n", b"Request line and headers took longer than"),
        (head(100) + b"{", b"The body paused for longer than request_body_timeout=1 seconds."),
        (head(100, "expect: 100-continue"), b"The body paused for longer than"),
        (raw_request("a") + b"POST /invo", b"Request line and headers took longer than"),
    ],
)
def test_a_client_that_stops_sending_is_not_waited_for(server: Server, sent: bytes, message: bytes) -> None:
    answer = exchanged(server, sent)
    assert message in answer
    assert (b"HTTP/1.1 408 Request Timeout" in answer) == bool(message)


def trickled(server: Server, start: bytes, rest: bytes) -> tuple[bytes, int]:
    """Send `rest` byte by byte, four in a second; return the answer and how many bytes the connection took."""
    with connect(server, start) as connection:
        connection.settimeout(0.25)
        answer, sent = bytearray(), 0
        for byte in rest:
            try:
                part = connection.recv(65536)
            except TimeoutError:
                pass
            except ConnectionResetError:  # the server had closed it before the byte of the turn before came
                break
            else:
                answer += part
                if not part:
                    break
            with contextlib.suppress(OSError):
                connection.sendall(bytes([byte]))
            sent += 1
        return bytes(answer), sent


@pytest.mark.parametrize(
    ("start", "rest", "message"),
    [
        (head(1000), b" " * 1000, b"The body came more slowly than min_transfer_rate=30 bytes a second."),
        (CHUNKED, b"1\r\n \r\n" * 200, b"The body came more slowly than min_transfer_rate=30 bytes a second."),
        (CHUNKED, b"1;" + b"x" * 1000, b"The body came more slowly than min_transfer_rate=30 bytes a second."),
        (b"POST /invocations HTTP/1.1\r\n", b"x: " + b"x" * 1000, b"Request line and headers took longer than"),
        (b"", b"\r\n" * 500, b""),
        (raw_request("a"), b"\r\n" * 500, b'"generated_text"'),
    ],
)
def test_a_byte_now_and_then_is_not_waited_for(server: Server, start: bytes, rest: bytes, message: bytes) -> None:
    """The server ends the connection before the last byte. A busy machine makes its seconds and the client's longer."""
    answer, sent = trickled(server, start, rest)
    assert message in answer
    assert sent < len(rest)


@pytest.mark.slow
def test_a_slow_body_may_come_at_any_rate_if_the_limit_is_off(tmp_path: Path) -> None:
    body = json.dumps(request("a")).encode()
    variables = {**SETTINGS, "SERVING_MIN_TRANSFER_RATE": "0"}
    with serving(tmp_path, variables=variables, libraries="") as server:
        answer, sent = trickled(server, head(len(body)), body + b"\n" * 20)
    assert answer.startswith(b"HTTP/1.1 200")
    assert sent >= len(body)


@pytest.mark.slow
def test_an_answer_that_is_read_byte_by_byte_is_not_held(tmp_path: Path) -> None:
    variables = {"SERVING_RESPONSE_READ_TIMEOUT": "1", "SERVING_MIN_TRANSFER_RATE": "1000000"}
    with (
        serving(tmp_path, variables=variables, libraries="") as server,
        connect(server, raw_request("flood", stream=True)) as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.until("lmi_requests_in_flight", 1)

        def is_dropped() -> bool:
            with contextlib.suppress(ConnectionResetError):
                connection.recv(2000)
            return server.metric("lmi_requests_in_flight") == 0

        wait_until(is_dropped, "the request has no place any more", limit_s=60)


@pytest.mark.slow
def test_a_connection_that_the_server_closes_is_not_held_by_its_last_bytes(tmp_path: Path) -> None:
    """What is left is too little to pause the writing; the keep-alive time of the connection ends it."""
    variables = {"SERVING_RESPONSE_READ_TIMEOUT": "1", "SERVING_KEEP_ALIVE_TIMEOUT": "1"}
    with serving(tmp_path, variables=variables, libraries="") as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        before = sockets(server)
        connection.connect(("127.0.0.1", server.port))
        for _ in range(60):
            connection.sendall(raw_request("x" * 20_000, 4))
        wait_until(lambda: sockets(server) == before, "it is closed", limit_s=60)


def sockets(server: Server) -> int:
    """Return how many sockets the server has open; one that is closed may be in the kernel for long."""
    names = []
    for entry in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(entry))
    return sum(name.startswith("socket:") for name in names)


HOSTS = ["x", "localhost:8080", "127.0.0.1:80", "[::1]:8080", "under_score", "", "x:"]


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_of_any_form_is_served(server: Server, host: str) -> None:
    assert exchanged(server, with_hosts(f"host: {host}\r\n")).startswith(b"HTTP/1.1 200")


def test_a_request_without_host_is_served_as_in_lmi(server: Server) -> None:
    assert exchanged(server, with_hosts("")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "lines",
    [
        "host: a\r\nhost: b\r\n",
        "host: a\r\nHOST: a\r\n",
        "host: a/b\r\n",
        "host: a@b\r\n",
        "host: a b\r\n",
        "host: a:b\r\n",
        "host: [::1\r\n",
        "host: \xff\r\n",
        f"host: {'[' * 60_000}\r\n",
    ],
)
def test_two_hosts_or_one_that_is_none_are_refused(server: Server, lines: str) -> None:
    answer = exchanged(server, with_hosts(lines))
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"The header Host is sent twice, or is not a host" in answer


def with_hosts(lines: str) -> bytes:
    body = json.dumps(request("a")).encode()
    head = f"POST /invocations HTTP/1.1\r\n{lines}connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode("latin-1") + body


def refused(server: Server, code: int) -> float:
    """Return how many refusals with this status the metrics count, whatever the model."""
    samples = re.findall(rf'^lmi_requests_total{{code="{code}",.*}} (\S+)$', server.http.get("/metrics").text, re.M)
    return sum(map(float, samples))


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"POST /invocations HTTP/1.1\r\nhost: x\r\n", 408),
        (head(100) + b"{", 408),
        (head(2, f"x: {'y' * 70_000}") + b"{}", 431),
        (CHUNKED + b"1\r\na\r\n" * 4000, 400),
        (head(2, *["x: y"] * 499) + b"{}", 431),
        (b"no http\r\n\r\n", 400),
    ],
)
def test_what_the_protocol_refuses_is_counted_once(server: Server, sent: bytes, code: int) -> None:
    before, gone = refused(server, code), refused(server, 499)
    assert exchanged(server, sent).startswith(b"HTTP/1.1 %d" % code)
    assert (refused(server, code), refused(server, 499)) == (before + 1, gone)


def test_requests_that_wait_for_an_earlier_one_have_a_limit(server: Server) -> None:
    """All that come in one read wait: reading pauses only behind it."""
    one = json.dumps(request("a", 1000, stream=True)).encode()
    answers = exchanged(server, head(len(one)) + one + b"GET /ping HTTP/1.1\r\n\r\n" * 3000)
    assert 500 < answers.count(b"HTTP/1.1 200") < 1500


def test_a_slow_client_that_goes_on_is_served(server: Server) -> None:
    body = json.dumps(request("a")).encode()
    with connect(server, head(len(body))) as connection:
        for start in range(0, len(body), 10):
            time.sleep(0.25)
            connection.sendall(body[start : start + 10])
        assert received(connection, b"}").startswith(b"HTTP/1.1 200")


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that waits for bodies, however slowly a loaded machine lets them come, but not for idle connections."""
    variables = {"SERVING_KEEP_ALIVE_TIMEOUT": "1", "SERVING_MAX_BUFFERED_SIZE": str(70 * MIB)}
    with serving(tmp_path_factory.mktemp("patient"), variables=variables) as server:
        yield server


def test_an_idle_connection_is_closed(patient: Server) -> None:
    began = time.monotonic()
    assert exchanged(patient, raw_request("a")).startswith(b"HTTP/1.1 200")
    assert time.monotonic() - began < 60, "the default is 75 seconds"


def test_more_connections_than_the_limit_are_refused(server: Server) -> None:
    connections = [connect(server, b"") for _ in range(30)]
    answer = exchanged(server, b"")
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"max_connections=30" in answer
    server.log_line("refusing clients: The server has max_connections=30 clients")
    for connection in connections:
        connection.close()
    wait_until(lambda: exchanged(server, raw_request("a", close=True)).startswith(b"HTTP/1.1 200"), "served")
    assert refused(server, 503) >= 1


def test_bodies_have_a_limit_together_and_their_memory_goes_back(patient: Server) -> None:
    before = resident_mib(patient)
    half = head(40 * MIB) + bytes(20 * MIB)  # there is room for three
    waiting = [connect(patient, half) for _ in range(8)]
    for number in range(5):
        answered = select.select(waiting, (), (), LIMIT_S)[0]
        assert answered, f"{number} of 5 were refused"
        waiting.remove(answered[0])
        with answered[0] as connection:
            answer = received(connection, b"}")
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"max_buffered_size=" in answer
    assert resident_mib(patient) < before + 150
    small = exchanged(patient, raw_request("a", close=True))
    assert small.startswith(b"HTTP/1.1 200"), "a small body is served"
    for connection in waiting:
        connection.close()
    wait_until(lambda: resident_mib(patient) < before + 30, "the memory is given back")


def resident_mib(server: Server) -> float:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096 / MIB


def test_trailers_do_not_change_the_request_and_have_a_limit(server: Server) -> None:
    body = json.dumps(request("a")).encode()
    with connect(server, chunked(body, b"x-priority: none\r\n\r\n")) as connection:
        assert received(connection, b"}").startswith(b"HTTP/1.1 200")
    for endless in (b"x: y\r\n" * 1000, b"x" * 6000):
        with connect(server, chunked(body, b"x-first: 1\r\n")) as connection:
            for _ in range(30):
                connection.sendall(endless)
                time.sleep(0.005)
            assert received(connection).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_client_that_reads_after_it_has_sent_everything_gets_the_413(server: Server, framing: str) -> None:
    size = 80 * MIB
    start = head(size) if framing == "length" else CHUNKED
    with connect(server, start) as connection:
        for _ in range(size // MIB):
            connection.sendall(bytes(MIB) if framing == "length" else b"100000\r\n%b\r\n" % bytes(MIB))
        assert received(connection).startswith(b"HTTP/1.1 413")
    assert server.invoke("a").status_code == 200


def test_a_client_that_ends_its_side_gets_its_answers(server: Server) -> None:
    for count in (1, 3):
        with connect(server, raw_request("a") * count) as connection:
            connection.shutdown(socket.SHUT_WR)
            answer = received(connection)
        assert answer.count(b"generated_text") == count


def test_a_client_that_ends_its_side_in_the_middle_of_a_stream_gets_the_rest(server: Server) -> None:
    word, count = "x" * 60_000, 100  # far more than the system takes, so that the answer cannot have ended
    sent = raw_request(word, count, stream=True) + raw_request("a b", 40, stream=True)
    with connect(server, sent) as connection:
        first = received(connection, b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        answers = Answers()
        answers.feed(first + received(connection))
    assert answers.statuses == [200, 200]
    assert [body.count(b'"token"') for body in answers.bodies] == [count, 40]


MANAGEMENT = b"POST /models HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n"


def test_a_client_that_leaves_half_way_is_no_error(server: Server) -> None:
    for sent in (raw_request("a") * 50, head(100), MANAGEMENT + b"{"):
        for _ in range(5):
            connect(server, sent).close()
    for number in range(20):  # streams behind each other, and a reset in the middle of one
        with connect(server, raw_request("a b c", 40, stream=True) * 50) as connection:
            if number % 2:
                connection.recv(100)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    broken = CHUNKED + b"x\r\n"  # refused before the task of the request has begun
    for sent in (broken.replace(b"host: x", b"host: x\r\nexpect: 100-continue"), raw_request("a") + broken):
        with connect(server, sent) as connection:
            received(connection)
    with connect(server, raw_request("wait", close=True)):
        server.until("lmi_requests_in_flight", 1)
    server.until("lmi_requests_in_flight", 0)
    server.http.get("/v1/nope")
    server.http.post("/models", params={"url": "/log/marker"})
    server.log_line("model marker could not be loaded")
    assert not [line for line in server.lines if "Traceback" in line or "uvicorn.error" in line]


def test_without_free_files_clients_are_turned_away_until_there_are_some(server: Server) -> None:
    pid = server.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    server.http.close()
    server.http = httpx.Client(base_url=server.http.base_url, timeout=60)
    most = len(os.listdir(f"/proc/{pid}/fd")) + 4
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, limits[1]))
    connections = [connect(server, b"") for _ in range(10)]
    server.log_line("clients and models are turned away: Too many open files; raise the limit")
    for connection in connections:
        connection.close()
    server.log_line("there are files for clients and models again")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert server.invoke("a").status_code == 200


@pytest.mark.slow
def test_a_worker_that_generates_text_has_a_limit_of_memory(server: Server) -> None:
    answer = server.invoke("leak")
    assert answer.status_code == 507
    assert "more than max_worker_memory_mb=300" in answer.text
    assert server.invoke("a").status_code == 200
    assert not [line for line in server.lines if "ends twice" in line]


@pytest.mark.slow
def test_a_client_that_reads_slowly_is_waited_for(server: Server) -> None:
    before = resident_mib(server)
    word, count = "x" * 60_000, 700
    with connect(server, raw_request(word, count, stream=True, close=True)) as connection:
        time.sleep(2)
        assert resident_mib(server) < before + 20
        answer = received(connection)
    assert answer.count(b'"token"') == count
    assert answer.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.slow
def test_what_clients_leave_unread_has_a_limit_together(server: Server) -> None:
    before = resident_mib(server)
    asked = raw_request("x" * 50_000, 210, close=True)  # 10 MiB are more than the system takes for one connection
    connections = [connect(server, asked) for _ in range(12)]
    for _ in range(8):
        server.log_line("more than max_unread_size=47185920; the connection of one with 1")
    server.until("lmi_requests_in_flight", 0)
    wait_until(lambda: resident_mib(server) < before + 90, "there is memory for the rest alone", limit_s=60)
    answers = [whole_or_cut(connection) for connection in connections]
    complete = [answer for answer in answers if answer.endswith(b"}")]
    assert 1 <= len(complete) <= 5
    assert {answer.count(b"x" * 50_000) for answer in complete} == {210}


def whole_or_cut(connection: socket.socket) -> bytes:
    with connection:
        try:
            return received(connection)
        except ConnectionResetError:
            return b""
