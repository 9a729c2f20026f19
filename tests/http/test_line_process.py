"""Many lines of the access log are made in a process of their own; all are written, whatever becomes of it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from frontend.line_process import LineProcess
from frontend.request_lines import Batches, lines_of
from frontend.request_log import RequestLog
from frontend.request_record import EndedRequest, RequestRecord
from frontend.server_log import BackgroundLog
from lmi_server.contract.protocol import Summary
from lmi_server.contract.secrets import SECRETS

SECRET = "a-secret-of-this-test"


def ended(number: int, model: str = "model") -> EndedRequest:
    summary = Summary("length", 5, 4, 0, 1, 0.25, 0.5, 0.25)
    record = RequestRecord(200, 1.0, 1.125, 1.25, 1.5, 2.0, summary)
    return EndedRequest(record, f"id-{number}", model, "invocations", "127.0.0.1")


def work(count: int) -> Batches:
    batch = msgspec.msgpack.encode([ended(number) for number in range(count)])
    return Batches("json", 1e9, (), [batch, batch])


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture
def process() -> Iterator[LineProcess]:
    process = LineProcess()
    yield process
    process.end()


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Any]:
    """Return a function that adds requests to a log in JSON and returns the lines that are written of them."""
    path = tmp_path / "log"

    def write(requests: list[EndedRequest]) -> list[dict[str, Any]]:
        async def add() -> None:
            for request in requests:
                log.add(request)
            log.close()

        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        log = RequestLog("json", 1.0)
        background = BackgroundLog(logging.getLogger("access"), fd)
        background.start()
        asyncio.run(add())
        background.close(30)
        os.close(fd)
        return [json.loads(line) for line in path.read_text().splitlines()]

    return write


def test_the_process_makes_the_lines_that_the_server_would_make(process: LineProcess) -> None:
    before = children()
    assert process.lines_of(work(40)) == lines_of(work(40))
    assert process.lines_of(work(3)) == lines_of(work(3))
    assert len(children() - before) == 1
    process.end()
    assert children() == before
    assert process.lines_of(work(3)) is None


def test_a_process_that_was_killed_is_told_and_not_started_again(
    process: LineProcess, caplog: pytest.LogCaptureFixture
) -> None:
    before = children()
    assert process.lines_of(work(1)) is not None
    [pid] = children() - before
    os.kill(pid, signal.SIGKILL)
    assert process.lines_of(work(1)) is None
    assert process.lines_of(work(1)) is None
    assert children() == before
    [told] = caplog.messages
    assert "the process that makes the lines of the access log failed" in told


def test_signals_to_the_group_do_not_end_it(process: LineProcess) -> None:
    before = children()
    process.lines_of(work(1))
    [pid] = children() - before
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert process.lines_of(work(2)) == lines_of(work(2))


@pytest.mark.parametrize("count", [1, 64, 1000])
def test_every_request_has_a_line_in_order_and_without_secrets(
    written: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SECRETS, "_values", (SECRET,))
    lines = written([ended(number, f"model\x9b{SECRET}") for number in range(count)])
    assert [line["id"] for line in lines] == [f"id-{number}" for number in range(count)]
    last = {name: lines[-1][name] for name in ("model", "duration_ms", "queue_ms", "ttft_ms", "output_tokens")}
    assert last == {
        "model": "model\x9b***",
        "duration_ms": 1000.0,
        "queue_ms": 125.0,
        "ttft_ms": 500.0,
        "output_tokens": 4,
    }


def test_a_log_that_is_closed_at_once_loses_nothing(written: Any) -> None:
    before = children()
    assert len(written([ended(number) for number in range(5000)])) == 5000
    assert children() == before
