"""What of a worker's output becomes lines of the server's log."""

from __future__ import annotations

import asyncio
import logging

import pytest
from relay_helpers import on_loop

from lmi_server.contract.metrics import Metric
from lmi_server.supervisor.log import WorkerLog


@on_loop
async def test_a_progress_bar_is_logged_as_its_last_state(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stream = asyncio.StreamReader()
    stream.feed_data(b"\rloading:   0%\rloading:  50%\rloading: 100%\nwindows\r\nERROR a: one\rERROR a: two\r\n")
    stream.feed_eof()
    log = WorkerLog("model-0")
    await log.forward(stream)
    assert list(log.last_lines) == ["loading: 100%", "windows", "ERROR a: two"]
    assert [record.getMessage() for record in caplog.records] == [
        "[model-0] loading: 100%",
        "[model-0] windows",
        "[model-0] ERROR a: two",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "ERROR"]


@on_loop
async def test_a_metric_begins_its_line() -> None:
    found: list[Metric] = []
    stream = asyncio.StreamReader()
    stream.feed_data(b"[METRICS]Own.Count:1|c\n")
    stream.feed_data(
        b"INFO own: [METRICS]Quoted.Count:1|c\n  [METRICS]Indented.Count:1|c\nx\r[METRICS]Hidden.Count:1|c\n"
    )
    stream.feed_data(b"[METRICS]Long.Count:1|#a:%b|c\n" % (b"x" * 2000))
    stream.feed_eof()
    await WorkerLog("model-0", on_metric=found.append).forward(stream)
    assert [metric.name for metric in found] == ["Own"]


@on_loop
async def test_the_rest_of_a_long_line_is_no_metric() -> None:
    found: list[Metric] = []
    stream = asyncio.StreamReader()
    reading = asyncio.create_task(WorkerLog("model-0", on_metric=found.append).forward(stream))
    for size in (64 * 1024, 10):  # each is read by itself, and more than one line may have
        stream.feed_data(b"x" * size)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    stream.feed_data(b"[METRICS]Forged.Count:1|c\n[METRICS]Own.Count:1|c\n")
    stream.feed_eof()
    await reading
    assert [metric.name for metric in found] == ["Own"]


@on_loop
async def test_the_rest_of_a_long_line_looks_like_no_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stream = asyncio.StreamReader()
    stream.feed_data(b"INFO own: " + b"ERROR forged: x " * 20_000 + b"\nERROR own: next\n")
    stream.feed_eof()
    await WorkerLog("model-0").forward(stream)
    first, *rest, last = caplog.records
    assert (first.levelname, last.levelname, last.getMessage()) == ("INFO", "ERROR", "[model-0] ERROR own: next")
    assert rest
    assert all(record.levelname == "INFO" and record.getMessage().startswith("[model-0]   ") for record in rest)
