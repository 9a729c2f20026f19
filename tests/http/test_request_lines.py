"""The lines of the access log: each request has one, in order and without secrets, however many end together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.observability.request_log import RequestLog
from frontend.observability.request_record import RequestRecord
from frontend.observability.server_log import BackgroundLog
from lmi_server.contract.protocol import Summary
from lmi_server.contract.texts.secrets import SECRETS

SECRET = "a-secret-of-this-test"


def ended_request(request_id: str, model: str, code: int = 200, summary: Summary | None = None) -> RequestRecord:
    times = {"queued": 1.125, "sent": 1.25, "first_byte": 1.5}
    return RequestRecord(code, 1.0, 2.0, request_id, model, "invocations", "127.0.0.1", summary=summary, **times)


@contextlib.contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Have the access log written to a file."""
    with path.open("wb") as file:
        background = BackgroundLog(logging.getLogger("access"), file.fileno())
        background.start()
        try:
            yield
        finally:
            background.close(30)


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Any]:
    """Return a function that adds requests, by number, to a log in JSON and returns the lines that are written."""
    path = tmp_path / "log"

    def write(numbers: range, model: str = "model", sample: float = 1.0, code: int = 200) -> list[dict[str, Any]]:
        summary = Summary("length", 5, 4, 0, 1, 0.25, 0.5, 0.25)

        async def add() -> None:
            for number in numbers:
                log.add(ended_request(f"id-{number}", model, code, summary))
            log.flush()

        log = RequestLog("json", sample)
        with logged_to(path):
            asyncio.run(add())
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
def test_a_value_in_a_line_of_text_looks_like_one_word(sent: str, shown: str, tmp_path: Path) -> None:
    line = written_line("text", sent, tmp_path)
    assert shown in line
    assert line.count("\n") == 1


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_long_id_is_cut(form: str, tmp_path: Path) -> None:
    line = written_line(form, "a" * 60_000, tmp_path)
    assert len(line) < 1000
    assert "a... (60000 characters)" in line


def written_line(form: str, request_id: str, directory: Path) -> str:
    async def add() -> None:
        log = RequestLog(form, 1.0)
        log.add(ended_request(request_id, "model"))
        log.flush()

    with logged_to(directory / "log"):
        asyncio.run(add())
    return (directory / "log").read_text()
