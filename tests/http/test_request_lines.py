"""The lines of the access log: each request has one, in order and without secrets, however many end together."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from frontend.observability.idle_calls import call_when_idle
from frontend.observability.request_lines import RequestLines
from frontend.observability.request_log import RequestLog
from frontend.observability.request_record import RequestRecord
from frontend.observability.server_log import BackgroundLog
from lmi_server.contract.protocol import Summary
from lmi_server.contract.secrets import SECRETS

SECRET = "a-secret-of-this-test"


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Any]:
    """Return a function that adds requests, by number, to a log in JSON and returns the lines that are written."""
    path = tmp_path / "log"

    def write(
        numbers: range, model: str = "model", sample: float = 1.0, code: int = 200, ends_groups: bool = True
    ) -> list[dict[str, Any]]:
        summary = Summary("length", 5, 4, 0, 1, 0.25, 0.5, 0.25)
        record = RequestRecord(code, 1.0, 1.125, 1.25, 1.5, 2.0, summary, "")

        async def add() -> None:
            for first in range(0, len(numbers), 7):
                lines = log.lines()
                for number in numbers[first : first + 7]:
                    lines.add(record, f"id-{number}", model, "invocations", "127.0.0.1", "")
                if ends_groups:
                    log.added()
            log.flush()

        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        log = RequestLog("json", sample)
        background = BackgroundLog(logging.getLogger("access"), fd)
        background.start()
        asyncio.run(add())
        background.close(30)
        os.close(fd)
        return [json.loads(line) for line in path.read_text().splitlines()]

    return write


@pytest.mark.parametrize("count", [1, 64, 1000])
def test_every_request_has_a_line_in_order_and_without_secrets(
    written: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SECRETS, "_values", (SECRET,))
    lines = written(range(count), f"model\x9b{SECRET}")
    assert [line["id"] for line in lines] == [f"id-{number}" for number in range(count)]
    last = {name: lines[-1][name] for name in ("model", "duration_ms", "queue_ms", "ttft_ms", "output_tokens")}
    assert last == {
        "model": "model\x9b***",
        "duration_ms": 1000.0,
        "queue_ms": 125.0,
        "ttft_ms": 500.0,
        "output_tokens": 4,
    }


def test_a_log_that_is_flushed_at_once_loses_nothing(written: Any) -> None:
    assert len(written(range(5000))) == 5000


def test_lines_of_a_group_that_is_broken_off_are_written(written: Any) -> None:
    assert len(written(range(5), ends_groups=False)) == 5


def test_a_share_of_the_successes_has_lines(written: Any) -> None:
    assert 150 < len(written(range(1000), sample=0.25)) < 350


def test_every_failure_has_a_line_however_few_successes_have(written: Any) -> None:
    assert written(range(100), sample=0.0) == []
    assert len(written(range(100), sample=0.0, code=424)) == 100


def test_a_url_in_a_line_loses_its_password(written: Any) -> None:
    [line] = written(range(1), "https://me:hidden@host/model")
    assert line["model"] == "https://***@host/model"


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("plain-id:1", "id=plain-id:1 "),
        ("a code=200 id=b", 'id="a code=200 id=b" '),
        ('say "hi"\nERROR b', r'id="say \"hi\"\nERROR b" '),
        ("turned\u202e\x7f", r"id=turned\u202e\u007f "),
    ],
)
def test_a_value_in_a_line_of_text_looks_like_one_word(sent: str, shown: str) -> None:
    lines = RequestLines("text", 1.0)
    lines.add(RequestRecord(200, 1.0, 1.125, 1.25, 1.5, 2.0, None, ""), sent, "model", "invocations", "127.0.0.1", "")
    lines.encode()
    assert shown in bytes(lines).decode()
    assert bytes(lines).count(b"\n") == 1


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_long_id_is_cut(form: str) -> None:
    lines = RequestLines(form, 1.0)
    lines.add(RequestRecord(200, 1.0, 1.125, 1.25, 1.5, 2.0, None, ""), "a" * 60_000, "m", "invocations", "", "")
    lines.encode()
    assert len(bytes(lines)) < 1000
    assert b"a... (60000 characters)" in bytes(lines)


def test_work_for_an_idle_loop_waits_for_what_is_ready_and_no_longer_than_it_may() -> None:
    events: list[str] = []

    async def busy(passes: int) -> None:
        for _ in range(passes):
            deadline = asyncio.get_running_loop().time() + 0.001
            while asyncio.get_running_loop().time() < deadline:
                pass
            events.append("busy")
            await asyncio.sleep(0)

    async def main() -> None:
        call_when_idle(lambda: events.append("idle"))
        await busy(3)
        await asyncio.sleep(0.05)
        call_when_idle(lambda: events.append("late"))
        await busy(30)

    asyncio.run(main())
    assert events[:4] == ["busy", "busy", "busy", "idle"]
    assert 4 < events.index("late") < len(events) - 5


def test_a_loop_that_has_something_to_read_is_not_idle() -> None:
    events: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        reading, writing = os.pipe()

        def read() -> None:
            loop.remove_reader(reading)
            os.read(reading, 1)
            deadline = loop.time() + 0.001
            while loop.time() < deadline:
                pass
            events.append("read")

        def begin() -> None:
            os.write(writing, b"x")
            call_when_idle(lambda: events.append("idle"))

        loop.add_reader(reading, read)
        loop.call_later(0.001, begin)
        await asyncio.sleep(0.05)
        os.close(reading)
        os.close(writing)

    uvloop.run(main())
    assert events == ["read", "idle"]
