"""The server's log: written in the background, so that whoever does not read it holds nobody up."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from forked_servers import ForkedServer
from paths import TESTS
from process_log import ProcessLog
from relay_helpers import HANDLERS
from server_helpers import make_model, request
from waiting import wait_until

from frontend.observability.server_log import BackgroundLog, WrittenLines

PRINTED = re.compile(r"\] x{100}$", re.MULTILINE)
PRINTED_LINES = 3000


class UnreadServer:
    """A server whose log is read up to the line that says that the model is ready, and not from then on."""

    def __init__(self, directory: Path) -> None:
        self.process = ForkedServer([str(make_model(directory / "model"))], os.environ, "worker")
        self.log = os.fdopen(os.dup(self.process.stderr.fileno()), "rb", buffering=0)
        self.process.stderr.close()
        port = ""
        while b"] ready: process" not in (line := self.log.readline()):
            assert line, "the server ended"
            found = re.search(rb"listening on http://127\.0\.0\.1:(\d+)", line)
            port = found[1].decode() if found else port
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)


@pytest.fixture
def unread(tmp_path: Path) -> Iterator[UnreadServer]:
    server = UnreadServer(tmp_path)
    with server.http, server.log:
        yield server
    server.process.kill()
    server.process.wait()


def test_a_log_that_nobody_reads_holds_nobody_up(unread: UnreadServer) -> None:
    for _ in range(2):
        answer = unread.http.post("/invocations", json=request("print"))
        assert answer.json() == {"generated_text": " print print print"}
    assert unread.http.get("/ping").status_code == 200
    unread.process.terminate()
    assert unread.process.wait(30) == 0


def test_a_second_signal_ends_the_wait_for_a_slow_reader(unread: UnreadServer) -> None:
    assert unread.http.post("/invocations", json=request("print")).status_code == 200
    with slow_reader(unread.log.fileno(), b"\0", 1 << 12, 0.1):
        unread.process.terminate()
        server = psutil.Process(unread.process.pid)
        wait_until(lambda: not server.children() and not server.net_connections("tcp"), "all but the log has ended")
        assert unread.process.poll() is None
        unread.process.terminate()
        assert unread.process.wait(60) == 1


def test_nothing_is_lost_once_somebody_reads_again(unread: UnreadServer) -> None:
    assert unread.http.post("/invocations", json=request("print")).status_code == 200
    assert unread.http.get("/ping").status_code == 200
    unread.process.terminate()
    assert len(PRINTED.findall(unread.log.read().decode())) == PRINTED_LINES
    assert unread.process.wait(30) == 0


# --- the background log alone ---


@contextlib.contextmanager
def background_log(capacity: int, blocking: bool = True) -> Iterator[tuple[BackgroundLog, logging.Logger, int]]:
    """Yield a background log that writes to a pipe, a logger of it, and the end of the pipe to read from."""
    reading, writing = os.pipe()
    os.set_blocking(writing, blocking)
    logger = logging.Logger("test")
    log = BackgroundLog(logger, writing, capacity)
    others = threading.enumerate()
    log.start()
    writers = [thread for thread in threading.enumerate() if thread not in others]
    try:
        yield log, logger, reading
    finally:
        with contextlib.suppress(OSError):
            os.close(reading)
        log.close(30)
        for writer in writers:  # it would write what it still has into the next file with this number
            writer.join(30)
        os.close(writing)


def read_until(reading: int, ending: bytes) -> str:
    data = b""
    while ending not in data:
        data += os.read(reading, 1 << 16)
    return data.decode()


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    with background_log(1 << 20) as (_, logger, reading):
        for number in range(5000):
            logger.warning("line %d %s", number, "x" * 500)
        logger.warning("also dropped")
        text = read_until(reading, b"not logged")
        kept = [int(number) for number in re.findall(r"line (\d+)", text)]
        assert kept == list(range(len(kept)))
        assert f"{5001 - len(kept)} lines were not logged" in text
        logger.warning("the end")
        assert "WARNING test: the end" in read_until(reading, b"the end\n")


def test_a_reader_that_keeps_up_gets_everything() -> None:
    with background_log(1 << 20) as (_, logger, reading):
        texts: list[str] = []
        reader = threading.Thread(target=lambda: texts.append(read_until(reading, b"ValueError: why\n")))
        reader.start()
        for number in range(2000):
            logger.warning("line %d", number)
        logger.error("the end", exc_info=ValueError("why"))
        reader.join()
        assert [int(number) for number in re.findall(r"line (\d+)", texts[0])] == list(range(2000))
        assert "ERROR test: the end\n" in texts[0]


def test_parts_of_lines_are_written_whole_and_in_order_however_little_a_pipe_takes_at_once() -> None:
    lines_of = [range(first, first + 9) for first in range(0, 27000, 9)]
    parts = [b"".join(b"line %d %s\n" % (number, b"x" * 100) for number in numbers) for numbers in lines_of]
    with background_log(8 << 20, blocking=False) as (_, logger, reading):
        logger.handle(WrittenLines("test", *parts))
        logger.warning("the end")
        lines = read_until(reading, b"the end\n").splitlines()
    assert [int(line.split()[1]) for line in lines[:-1]] == list(range(27000))


def test_the_end_waits_for_nobody() -> None:
    with background_log(1 << 20) as (log, logger, _):
        for _ in range(5000):
            logger.warning("x" * 500)
        before = time.monotonic()
        log.close(0.2)
        assert time.monotonic() - before < 5


def test_the_end_waits_for_a_reader_that_is_slow() -> None:
    with background_log(8 << 20) as (log, logger, reading):
        for number in range(40):
            logger.warning("line %d %s", number, "x" * 60_000)
        texts: list[str] = []

        def read() -> None:
            while not texts or "line 39" not in texts[-1]:
                texts.append(os.read(reading, 1 << 16).decode())
                time.sleep(0.05)

        reader = threading.Thread(target=read)
        reader.start()
        log.close(0.5)  # of the two seconds that it takes at least
        assert "line 37" in "".join(texts)  # the pipe holds one more
        reader.join()
        assert re.findall(r"line (\d+)", "".join(texts)) == [str(number) for number in range(40)]


@contextlib.contextmanager
def slow_reader(reading: int, ending: bytes, part: int = 1 << 14, every_s: float = 0.03) -> Iterator[bytearray]:
    """Yield what is read, `part` bytes every `every_s` seconds; at the end it is read up to `ending` or its own end."""
    data = bytearray()

    def read() -> None:
        while ending not in data[-1000:] and (found := os.read(reading, part)):
            data.extend(found)
            time.sleep(every_s)

    reader = threading.Thread(target=read)
    reader.start()
    yield data
    reader.join()


PIPE = (1 << 16) + (1 << 14)  # bytes: what a pipe holds, and what is being read of it


def test_the_end_waits_for_a_slow_reader_of_one_long_record() -> None:
    with background_log(8 << 20) as (log, logger, reading), slow_reader(reading, b"the end\n") as data:
        logger.handle(WrittenLines("test", b"%b the end\n" % (b"x" * 900_000)))
        log.close(1)  # the record takes longer
        assert len(data) > 900_000 - PIPE


def test_the_end_waits_for_a_reader_that_takes_a_page_at_a_time() -> None:
    with background_log(8 << 20) as (log, logger, reading):
        fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, 1 << 12)
        logger.handle(WrittenLines("test", b"%b the end\n" % (b"x" * 40_000)))
        with slow_reader(reading, b"the end\n", 1 << 12, 0.25) as data:
            log.close(0.75)  # four pages take longer
            assert len(data) > 40_000 - (1 << 13)


def test_the_end_waits_for_a_slow_reader_of_a_log_that_is_full() -> None:
    with background_log(1 << 16) as (log, logger, reading):
        logger.handle(WrittenLines("test", b"x" * 900_000 + b"\n"))
        assert select.select([reading], (), (), 60)[0], "the writer is at this record"
        for number in range(200):
            logger.warning("line %d %s", number, "x" * 500)
        with slow_reader(reading, b"not logged, because the log is read too slowly\n") as data:
            log.close(1)
            assert len(data) > 900_000 - PIPE
    kept = len(re.findall(rb"line \d+ ", data))
    assert 1 < kept < 200
    assert b"%d lines were not logged" % (200 - kept) in data


def test_long_lines_are_written_in_order_and_whole() -> None:
    parts = [b"%d %s\n" % (number, b"x" * (number % 7 * 9000)) for number in range(50)]
    parts += [b"", b"\n", b"".join(b"%d\n" % number for number in range(50, 9000))]
    with background_log(8 << 20) as (_, logger, reading):
        logger.handle(WrittenLines("test", *parts))
        logger.warning("the end")
        assert read_until(reading, b"the end\n").encode().startswith(b"".join(parts))


def test_a_reader_that_is_gone_is_no_error() -> None:
    with background_log(1 << 20) as (log, logger, reading):
        os.close(reading)
        logger.warning("nobody reads this")
        log.close(30)


# --- the log in JSON ---


def test_lines_that_a_full_disk_does_not_take_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    room = [10_050]  # bytes that fit on the disk
    refused: list[bytes] = []
    write = os.write

    def write_what_fits(fd: int, data: memoryview) -> int:
        if threading.current_thread() is threading.main_thread():
            return write(fd, data)
        if not room[0]:
            refused.append(bytes(data))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(fd, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", write_what_fits)
    with background_log(1 << 20) as (_, logger, reading):
        logger.handle(WrittenLines("test", *(b"%099d\n" % number for number in range(200)), b"%0999d\n" % 0 * 56))
        logger.warning("lost as well")
        wait_until(lambda: refused and b"lost as well" in refused[-1], "the disk is full")
        room[0] = 1 << 20
        logger.warning("the end")
        lines = read_until(reading, b"the end\n").splitlines()
    assert [int(line) for line in lines[:100]] == list(range(100))
    assert lines[100] == "0" * 50, "a part of a line"
    assert lines[101].endswith(": 157 lines of the log were lost, because they could not be written")
    assert len(lines) == 103


def log_in_json(directory: Path, *arguments: str, code: int, until: str = "", **variables: str) -> list[Any]:
    """Start a server with the log in JSON, stop it at a line with `until`, and return all lines of the log."""
    path = os.pathsep.join([HANDLERS, str(TESTS.parent)])
    process = subprocess.Popen(
        [sys.executable, "-m", "lmi_server", "serve", *arguments, "--port", "0"],
        stderr=subprocess.PIPE,
        cwd=directory,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "SERVING_LOG_FORMAT": "json"} | variables,
    )
    log = ProcessLog(process.stderr)
    try:
        if until:
            log.wait_for(until)
            process.terminate()
        assert process.wait(120) == code, log.lines
    finally:
        process.kill()
        log.close()
    return [json.loads(line) for line in log.lines]


@pytest.mark.slow
def test_a_log_in_json_is_json_from_the_first_line(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (tmp_path / "config.properties").write_text("log_format=json\nno_such_setting=1\n")
    lines = log_in_json(tmp_path, str(model), "--config-file", "config.properties", code=0, until="ready: process")
    assert {line["log"] for line in lines} == {"server"}
    assert [line for line in lines if "no_such_setting" in line["message"]]
    ready = next(line for line in lines if line["message"].startswith("ready: process"))
    assert (ready["model"], ready["worker"], ready["logger"]) == (
        "model",
        "model-0",
        "lmi_server.serving.pool.membership",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "timeout", "message"), [([], "none", '"none" is not allowed'), (["nowhere"], "1", "nowhere")]
)
def test_errors_before_the_start_are_lines_in_json(
    tmp_path: Path, arguments: list[str], timeout: str, message: str
) -> None:
    [line] = log_in_json(tmp_path, *arguments, code=1, SERVING_DRAIN_TIMEOUT=timeout)
    assert (line["level"], message in line["message"]) == ("ERROR", True)


@pytest.mark.slow
def test_a_worker_that_raises_leaves_one_line_in_json(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.py").write_text(
        "import logging, traceback\n"
        "logging.getLogger('my.code').error('it began')\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n"
        "    logging.getLogger('my.code').exception('it failed')\n    traceback.print_exc()\n"
        "def handle(inputs):\n    return None\n"
    )
    lines = log_in_json(tmp_path, "model", code=0, until="ready: process")
    logged = [line for line in lines if line["logger"] == "my.code"]
    assert [line["message"].partition("\n")[0] for line in logged] == ["it began", "it failed"]
    assert logged[1]["message"].endswith("ZeroDivisionError: division by zero")
    assert (logged[1]["level"], logged[1]["model"], logged[1]["worker"]) == ("ERROR", "model", "model-0")
    [printed] = [line for line in lines if line["message"].startswith("Traceback")]
    assert printed["message"].endswith("ZeroDivisionError: division by zero")
