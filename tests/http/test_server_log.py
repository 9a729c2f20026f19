"""The server's log: written in the background, so that whoever does not read it holds nobody up."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from paths import TESTS
from relay_helpers import HANDLERS
from server_helpers import make_model, request

from frontend.server_log import BackgroundLog

PRINTED = re.compile(r"\] x{100}$", re.MULTILINE)
PRINTED_LINES = 3000


class UnreadServer:
    """A server whose log is read up to the line that says that the model is ready, and not from then on."""

    def __init__(self, directory: Path) -> None:
        path = os.pathsep.join([HANDLERS, str(TESTS.parent)])
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "models" / "fault_server.py"), str(make_model(directory / "model"))],
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            bufsize=0,
        )
        assert self.process.stderr is not None
        self.log = self.process.stderr
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


def test_nothing_is_lost_once_somebody_reads_again(unread: UnreadServer) -> None:
    assert unread.http.post("/invocations", json=request("print")).status_code == 200
    assert unread.http.get("/ping").status_code == 200
    unread.process.terminate()
    assert len(PRINTED.findall(unread.log.read().decode())) == PRINTED_LINES
    assert unread.process.wait(30) == 0


# --- the background log alone ---


@contextlib.contextmanager
def background_log(capacity: int) -> Iterator[tuple[BackgroundLog, logging.Logger, int]]:
    """Yield a background log that writes to a pipe, a logger of it, and the end of the pipe to read from."""
    reading, writing = os.pipe()
    logger = logging.Logger("test")
    log = BackgroundLog(logger, writing, capacity)
    log.start()
    try:
        yield log, logger, reading
    finally:
        with contextlib.suppress(OSError):
            os.close(reading)
        log.close(30)
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


def test_the_end_waits_for_nobody() -> None:
    with background_log(1 << 20) as (log, logger, _):
        for _ in range(5000):
            logger.warning("x" * 500)
        before = time.monotonic()
        log.close(0.2)
        assert time.monotonic() - before < 5


def test_a_reader_that_is_gone_is_no_error() -> None:
    with background_log(1 << 20) as (log, logger, reading):
        os.close(reading)
        logger.warning("nobody reads this")
        log.close(30)
