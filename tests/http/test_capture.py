"""Requests and answers in the lines of SageMaker's data capture."""

from __future__ import annotations

import base64
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_helpers import Server, connect, make_model, raw_request, received, request, running
from waiting import wait_until

from frontend.capture.destinations import BucketObjects, LostError, RotatingFiles, destination
from frontend.capture.exchange import Budget, CapturedExchange
from frontend.capture.settings import CaptureSettings
from frontend.capture.writer import CaptureWriter, captured_line
from lmi_server.bench.prompt_files import read_prompts
from lmi_server.contract.errors import ConfigurationError


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    variables = {
        "SERVING_CAPTURE_TO": str(tmp_path / "captured"),
        "SERVING_CAPTURE_REDACT": "user, secret",
        "SERVING_CAPTURE_MAX_BYTES": "400",
    }
    with running(make_model(tmp_path / "model"), variables=variables, workers=1) as server:
        yield server


def lines(directory: Path, count: int) -> list[dict[str, Any]]:
    """Return the captured lines, once there are so many."""

    def found() -> list[str]:
        return [line for path in sorted(directory.glob("*.jsonl")) for line in path.read_text().splitlines()]

    wait_until(lambda: len(found()) >= count, f"{count} lines are captured")
    return [json.loads(line) for line in found()]


def attributes(line: Mapping[str, Any]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in line["eventMetadata"]["customAttributes"])


def test_requests_and_answers_are_captured_whatever_they_hold(server: Server, tmp_path: Path) -> None:
    body = {"model": "model", "prompt": "a b", "max_tokens": 2, "user": "Ada", "nested": [{"secret": {"a": 1}}]}
    whole = server.http.post("/v1/completions", json=body, headers={"x-amzn-sagemaker-inference-id": "mine"})
    stream = server.http.post("/v1/completions", json=body | {"stream": True})
    assert (whole.status_code, stream.status_code) == (200, 200)
    server.http.post("/predictions/no%0Asuch%22model", json={"inputs": "x"})
    server.http.post("/invocations", content=b"\xff\xfe{", headers={"content-type": "application/json"})
    server.http.post("/invocations", json={"inputs": "long " * 200})
    captured = lines(tmp_path / "captured", 5)
    assert len(captured) == 5
    first, second, unknown, broken, long = captured
    sent = json.loads(first["captureData"]["endpointInput"]["data"])
    assert (sent["prompt"], sent["user"], sent["nested"]) == ("a b", "[redacted]", [{"secret": "[redacted]"}])
    assert first["captureData"]["endpointInput"]["encoding"] == "JSON"
    assert json.loads(first["captureData"]["endpointOutput"]["data"]) == whole.json()
    assert first["eventMetadata"]["inferenceId"] == "mine"
    assert (first["eventVersion"], attributes(first)["status"]) == ("0", "200")
    assert b"data: [DONE]" in base64.b64decode(second["captureData"]["endpointOutput"]["data"])[:401] or (
        attributes(second)["truncated"] == "output"
    )
    assert attributes(unknown)["status"] == "404"
    assert attributes(unknown)["path"] == '/predictions/no\nsuch"model', "it is data in JSON, and no line of its own"
    assert "redacted" in broken["captureData"]["endpointInput"]["data"]
    assert attributes(long)["truncated"] == "input"
    assert "long" not in long["captureData"]["endpointInput"]["data"], "what was cut off cannot be redacted"
    (path,) = (tmp_path / "captured").glob("*.jsonl")
    assert path.stat().st_mode & 0o777 == 0o600
    text = server.http.get("/metrics").text
    assert 'lmi_captured_requests_total{outcome="written"} 5' in text
    assert 'lmi_captured_requests_total{outcome="failed"} 0' in text
    assert "lmi_capture_failures_total 0" in text
    prompts = read_prompts(path)
    assert [(prompt.text, prompt.output_tokens) for prompt in prompts] == [("a b", 2)] * 2
    assert prompts[0].at == 0


def test_a_client_that_leaves_and_a_stream_end_once_and_are_captured(server: Server, tmp_path: Path) -> None:
    with connect(server, raw_request("a b", 20000, stream=True)) as client:
        received(client, b"token")
    server.until("lmi_requests_in_flight", 0)
    (line,) = lines(tmp_path / "captured", 1)
    assert "output" in attributes(line)["truncated"]
    assert server.invoke("a").status_code == 200


@pytest.mark.slow
def test_only_a_share_is_captured_and_nothing_of_clients_without_access(tmp_path: Path) -> None:
    for percentage, keys in (("0", ""), ("100", "secret")):
        directory = tmp_path / f"captured{percentage}"
        variables = {"SERVING_CAPTURE_TO": str(directory), "SERVING_CAPTURE_PERCENTAGE": percentage}
        variables |= {"SERVING_API_KEYS": keys} if keys else {}
        with running(make_model(tmp_path / f"model{percentage}"), variables=variables, workers=1) as server:
            assert server.invoke("a").status_code == (401 if keys else 200)
            assert server.stop() == 0
        assert not list(directory.glob("*.jsonl"))


def test_what_waits_is_written_before_the_server_ends(tmp_path: Path) -> None:
    variables = {"SERVING_CAPTURE_TO": str(tmp_path / "captured")}
    with running(make_model(tmp_path / "model"), variables=variables, workers=1) as server:
        with ThreadPoolExecutor() as threads:
            answers = list(threads.map(lambda _: server.invoke("a b"), range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert server.stop() == 0
    assert len(lines(tmp_path / "captured", 20)) == 20


# --- the parts ---


def exchange(data: bytes, budget: Budget, content_type: str = "application/json", path: str = "/x") -> CapturedExchange:
    made = CapturedExchange(
        "invocations", {"path": path, "headers": [(b"content-type", content_type.encode())]}, 10**6, budget
    )
    made._add(made.request, data)
    made.ended = time.monotonic()
    return made


class ListedLines:
    """Keeps lines in memory, each once `gate` is set; a stand-in for a slow disk."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.lines: list[bytes] = []

    def write(self, line: bytes) -> int:
        assert self.gate.wait(60)
        self.lines.append(line)
        return 1

    def flush(self, now: bool) -> int:
        """Keep nothing back."""
        return 0


def test_a_disk_that_does_not_keep_up_costs_captures_and_no_memory() -> None:
    slow, budget = ListedLines(), Budget(1000)
    writer = CaptureWriter(slow, frozenset())
    for _ in range(30):
        writer.add(exchange(b'"' + b"x" * 98 + b'"', budget))
    assert budget.taken <= 1000
    assert writer.dropped >= 19
    slow.gate.set()
    writer.close(60)
    assert (budget.taken, writer.written + writer.dropped) == (0, 30)
    assert len(slow.lines) == writer.written


def test_what_is_held_of_short_requests_with_long_headers_is_counted() -> None:
    slow, budget = ListedLines(), Budget(100_000)
    writer = CaptureWriter(slow, frozenset())
    for _ in range(1000):
        writer.add(exchange(b"", budget))
    for _ in range(100):
        writer.add(exchange(b"", budget, "x" * 9000, "/" + "p" * 9000))
    assert writer.dropped >= 800
    slow.gate.set()
    writer.close(60)
    assert (budget.taken, writer.written + writer.dropped) == (0, 1100)


class FullDisk:
    """Takes nothing; a stand-in for a disk that is full."""

    def write(self, line: bytes) -> int:
        raise LostError(1, "no space left on device")

    def flush(self, now: bool) -> int:
        raise OSError("no space left on device")


def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    budget = Budget(10**6)
    writer = CaptureWriter(FullDisk(), frozenset())
    for _ in range(5):
        writer.add(exchange(b"{}", budget))
    writer.close(60)
    assert (writer.written, writer.failed, writer.dropped, budget.taken) == (0, 5, 0, 0)
    assert writer.failures > 5


def test_a_disk_that_is_full_within_a_line_breaks_no_other_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, write = RotatingFiles(tmp_path, size=1000, count=3), os.write
    files.write(b"first\n")
    room = [4]

    def write_what_fits(file: int, data: bytes) -> int:
        if not room:
            raise OSError("no space left on device")
        return write(file, data[: room.pop()])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write_what_fits)
        with pytest.raises(OSError, match="no space"):
            files.write(b"second\n")
    files.write(b"third\n")
    assert b"".join(path.read_bytes() for path in tmp_path.glob("*.jsonl")) == b"first\nthird\n"


def test_files_take_turns_and_the_oldest_go(tmp_path: Path) -> None:
    (tmp_path / "capture-other.txt").write_text("not a capture")
    files = RotatingFiles(tmp_path, size=100, count=3)
    for number in range(40):
        files.write(b"%040d\n" % number)
    kept = sorted(tmp_path.glob("capture-*.jsonl"))
    assert len(kept) == 3
    assert b"".join(path.read_bytes() for path in kept).endswith(b"%040d\n" % 39)
    assert all(path.stat().st_size <= 141 for path in kept)
    assert (tmp_path / "capture-other.txt").exists()


def test_lines_go_to_a_new_file_when_someone_has_removed_the_directory(tmp_path: Path) -> None:
    files = RotatingFiles(tmp_path / "captured", size=100, count=3)
    files.write(b"first\n")
    shutil.rmtree(tmp_path / "captured")
    files.write(b"second\n")
    assert [path.read_bytes() for path in (tmp_path / "captured").iterdir()] == [b"second\n"]


def test_what_cannot_be_removed_loses_no_line_and_keeps_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "capture-0.jsonl").mkdir()
    files = RotatingFiles(tmp_path, size=1, count=3)
    assert [files.write(b"line\n") for _ in range(9)] == [1] * 9
    assert len(list(tmp_path.iterdir())) == 4


class ListedObjects:
    """Keeps objects in a dictionary; a fake of a store on S3."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = data


def test_objects_on_s3_have_the_hour_in_their_names_and_a_bounded_size() -> None:
    store = ListedObjects()
    objects = BucketObjects(store, 100)
    for _ in range(10):
        objects.write(b"x" * 39 + b"\n")
    objects.flush(now=False)
    assert len(store.objects) == 3
    objects.flush(now=True)
    assert b"".join(store.objects.values()) == (b"x" * 39 + b"\n") * 10
    assert all(key.startswith("20") and key.count("/") == 4 for key in store.objects)


class FailingObjects(ListedObjects):
    """Refuses every second object; a fake of S3 that is throttled."""

    calls = 0

    def put(self, key: str, data: bytes) -> None:
        self.calls += 1
        if self.calls % 2:
            raise OSError("s3://bucket: slow down")
        super().put(key, data)


def test_each_exchange_that_s3_does_not_take_is_counted_and_none_twice() -> None:
    client, budget = FailingObjects(), Budget(10**6)
    line = len(captured_line(exchange(b"{}", budget), ()))
    writer = CaptureWriter(BucketObjects(client, 3 * line), frozenset())
    for _ in range(10):
        writer.add(exchange(b"{}", budget))
    writer.close(60)
    kept = b"".join(client.objects.values()).count(b"\n")
    assert (writer.written, writer.failed, writer.dropped) == (kept, 10 - kept, 0)
    assert (client.calls, writer.failures) == (4, 2)


@pytest.mark.parametrize("place", ["gs://bucket/prefix", "https://example.com/x", "S3://bucket", "s3:///prefix"])
def test_a_place_that_cannot_be_written_is_refused_by_name(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=f'capture_to = "{place}".*allowed: .*s3://bucket/prefix'):
        destination(CaptureSettings(capture_to=place))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content_type", "data"),
    [
        ("application/json", b"[" * 100_000),
        ("application/json", b'{"a":' * 5000 + b"1" + b"}" * 5000),
        ("application/json", b'{"secret": "kept", "secret": "twice"'),
        ("text/event-stream", b"data: {not json secret}\nevent: x\n\ndata: [DONE]\n"),
        ("text/plain", b"secret: kept"),
        ("application/json", b'{"secr\\u0065t": "kept", "x": [{"secret": {"deep": "kept"}}]}'),
        ("\x00\n", b"\x00secret\x00"),
    ],
)
def test_nothing_of_a_redacted_field_is_left(content_type: str, data: bytes) -> None:
    line = captured_line(exchange(data, Budget(10**6), content_type, path="/\udcff\n"), {"secret"})
    assert line.count(b"\n") == 1
    given = json.loads(line)["captureData"]["endpointInput"]
    held = base64.b64decode(given["data"]) if given["encoding"] == "BASE64" else given["data"].encode()
    assert b"kept" not in held
    assert b"not json" not in held


def test_a_captured_file_without_a_prompt_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "captured.jsonl"
    path.write_bytes(captured_line(exchange(b'{"input": "embed me"}', Budget(10**6)), ()))
    with pytest.raises(ConfigurationError, match="has no prompts"):
        read_prompts(path)


def test_a_captured_text_with_other_ends_of_lines_is_a_prompt(tmp_path: Path) -> None:
    bodies = ['{"prompt": "one\u2028two\x85"}', '{"prompt": "left out", "max_tokens": 1e999}']
    made = [exchange(body.encode(), Budget(10**6)) for body in bodies]
    path = tmp_path / "captured.jsonl"
    path.write_bytes(b"".join(captured_line(each, ()) for each in made))
    assert [prompt.text for prompt in read_prompts(path)] == ["one\u2028two\x85"]


def test_a_captured_file_without_lines_hides_no_other_one(tmp_path: Path) -> None:
    (tmp_path / "capture-0.jsonl").touch()
    made = exchange(b'{"prompt": "one"}', Budget(10**6))
    (tmp_path / "capture-1.jsonl").write_bytes(captured_line(made, ()))
    assert [prompt.text for prompt in read_prompts(tmp_path)] == ["one"]


def test_captured_responses_are_asked_as_chats_from_all_files_of_a_directory(tmp_path: Path) -> None:
    parts = [{"type": "input_text", "text": "sec"}, {"type": "input_text", "text": "ond"}]
    bodies: list[dict[str, Any]] = [
        {"input": "first", "max_output_tokens": 5},
        {"instructions": "Be brief.", "input": [{"role": "user", "content": parts}, {"type": "reasoning"}]},
        {"input": "left out", "previous_response_id": "resp_1"},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": 7},
    ]
    for number, body in enumerate(bodies):
        made = exchange(json.dumps(body).encode(), Budget(10**6), path="/v1/responses")
        made.arrived = 1_700_000_000 + number
        (tmp_path / f"capture-{number}.jsonl").write_bytes(captured_line(made, ()).rstrip())
    (tmp_path / "other.txt").write_text("no prompts")
    first, second = read_prompts(tmp_path)
    assert first.chat == [{"role": "user", "content": "first"}]
    assert (first.output_tokens, first.at, second.at) == (5, 0.0, 1.0)
    assert second.chat == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "second"}]


def test_captured_prompts_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    bodies = [
        {"messages": [{"role": "user", "content": "third"}], "max_completion_tokens": 3},
        request("first", 5),
        {"prompt": "second", "max_tokens": 7},
    ]
    made = [exchange(json.dumps(body).encode(), Budget(10**6), "application/octet-stream") for body in bodies]
    for each, second in zip(made, (3, 1, 2.5), strict=True):
        each.arrived = 1_700_000_000 + second
    path = tmp_path / "captured.jsonl"
    path.write_bytes(b"".join(captured_line(each, ()) for each in made) + b'{"captureData": 3}\n[[[\n')
    assert [
        (prompt.text or prompt.chat[0]["content"], prompt.at, prompt.output_tokens) for prompt in read_prompts(path)
    ] == [
        ("first", 0.0, 5),
        ("second", 1.5, 7),
        ("third", 2.0, 3),
    ]
