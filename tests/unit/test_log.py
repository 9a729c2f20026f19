"""What of a worker's output becomes lines of the server's log."""

from __future__ import annotations

import asyncio
import json
import logging
import os

import pytest
from relay_helpers import on_loop

from frontend.observability.server_log import BackgroundLog, JsonFormatter
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


async def logged(*chunks: bytes) -> None:
    """Have a worker write these chunks."""
    stream = asyncio.StreamReader()
    for chunk in chunks:
        stream.feed_data(chunk)
    stream.feed_eof()
    await WorkerLog("model:1-0").forward(stream)


RAW = b"""print: 1
Traceback (most recent call last):
  File "model.py", line 3, in handle
    1 / 0
ZeroDivisionError: division by zero

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "model.py", line 5, in handle
    raise ValueError("no")
ValueError: no
print: 2
  print: 3
"""


@on_loop
async def test_a_traceback_is_one_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await logged(*(RAW[start : start + 50] for start in range(0, len(RAW), 50)))
    first, traceback, *others = [record.getMessage() for record in caplog.records]
    assert first == "[model:1-0] print: 1"
    assert traceback.startswith("[model:1-0] Traceback (most")
    assert traceback.endswith('raise ValueError("no")\nValueError: no')
    assert others == ["[model:1-0] print: 2", "[model:1-0]   print: 3"]


@pytest.mark.parametrize("indent", [b"", b"  "])
@on_loop
async def test_a_traceback_belongs_to_the_line_of_its_logger(caplog: pytest.LogCaptureFixture, indent: bytes) -> None:
    """A worker's own loggers indent what follows, other formatters do not."""
    caplog.set_level(logging.INFO)
    traceback = [b"Traceback (most recent call last):", b"  File a", b"ValueError: no"]
    await logged(
        b"\n".join([b"ERROR my.code: it failed", *(indent + line for line in traceback), b"INFO b: next", b""])
    )
    failed, following = caplog.records
    assert failed.levelname == "ERROR"
    assert json.loads(JsonFormatter().format(failed)) | {"time": ""} == {
        "log": "server",
        "time": "",
        "level": "ERROR",
        "logger": "my.code",
        "model": "model:1",
        "worker": "model:1-0",
        "message": "it failed\nTraceback (most recent call last):\n  File a\nValueError: no",
    }
    assert following.getMessage() == "[model:1-0] INFO b: next"


@on_loop
async def test_a_traceback_without_an_end_is_logged_in_parts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await logged(b"Traceback (most recent call last):\n", *[b"  " + b"x" * 9_998 + b"\n"] * 20)
    sizes = [len(record.getMessage()) for record in caplog.records]
    assert sum(sizes) > 200_000
    assert max(sizes) < 70_000


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


def test_the_server_s_log_is_written() -> None:
    """On every version of Python that the fast tests run on: the handler has no lock, which logging may ask for."""
    reading, writing = os.pipe()
    logger = logging.Logger("server")
    log = BackgroundLog(logger, writing)
    log.start()
    logger.warning("one")
    logger.warning("two")
    log.close(30)
    os.close(writing)
    with open(reading, "rb") as written:
        lines = written.read().decode().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["one", "two"]
