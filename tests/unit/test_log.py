"""What of a worker's output becomes lines of the server's log."""

from __future__ import annotations

import asyncio
import logging

import pytest
from relay_helpers import on_loop

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
