"""`lmi-server run-batch`: a file of requests is answered without a server, and goes on where it has ended."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from forked_servers import ForkedCommand
from process_log import LIMIT_S
from relay_helpers import HANDLERS
from server_helpers import make_model
from waiting import wait_until

from lmi_server.batches.offline import OfflineBatch
from lmi_server.contract.errors import ConfigurationError


def line(number: int, tokens: int = 3, **more: Any) -> dict[str, Any]:
    body = {"model": "lmi", "prompt": f"text {number}", "max_tokens": tokens}
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": {**body, **more}}


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def begin(directory: Path, requests: Path, *more: str) -> ForkedCommand:
    arguments = ["run-batch", str(requests), str(directory / "out.jsonl"), "--model", str(directory / "model"), *more]
    path = {"PYTHONPATH": os.pathsep.join([HANDLERS, os.getcwd()])}
    return ForkedCommand(arguments, os.environ | path, directory, "worker")


def end(process: ForkedCommand) -> tuple[int, str]:
    """Return the exit code of a call, and what it has printed."""
    errors = process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    return process.wait(LIMIT_S), errors


def test_a_killed_call_goes_on_and_errors_are_answers(tmp_path: Path) -> None:
    make_model(tmp_path / "model", echo_delay_ms=10)
    lines = [line(number, tokens=5 + number % 30) for number in range(80)] + [line(80, temperature="hot")]
    requests = write(tmp_path / "in.jsonl", lines)
    partial = tmp_path / "out.jsonl.partial"
    first = begin(tmp_path, requests, "--concurrency", "8")
    wait_until(lambda: partial.exists() and partial.read_bytes().count(b"\n") > 20, "some answers are written")
    first.kill()
    end(first)
    before = set(partial.read_bytes().split(b"\n")[:-1])
    code, errors = end(begin(tmp_path, requests))
    assert (code, "80 answers, 1 errors" in errors) == (1, True), errors
    text = (tmp_path / "out.jsonl").read_bytes()
    found = [json.loads(each) for each in text.splitlines()]
    assert sorted(each["custom_id"] for each in found) == sorted(each["custom_id"] for each in lines)
    assert before <= set(text.splitlines())
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "model", requests, tmp_path / "out.jsonl"])


def test_a_wrong_line_is_named_before_the_model_loads(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    requests = write(tmp_path / "in.jsonl", [line(0), line(1), line(0)])
    code, errors = end(begin(tmp_path, requests))
    assert code == 1
    assert "in.jsonl:3: custom_id id-0 is that of an earlier line" in errors


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.partial"])
def test_answers_do_not_take_the_place_of_the_requests(name: str, tmp_path: Path) -> None:
    requests = write(tmp_path / name, [line(0)])
    before = requests.read_bytes()
    with pytest.raises(ConfigurationError, match="is the file of the requests"):
        asyncio.run(OfflineBatch(requests, tmp_path / "out.jsonl", 1).run(str(tmp_path / "model"), os.environ))
    assert requests.read_bytes() == before
