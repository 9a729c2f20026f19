"""Files and batches by OpenAI's SDK, and their way through sudden ends."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from artifact_helpers import BUCKET, s3_server
from openai_clients import KEYS, client_of
from server_helpers import Server, make_model, running
from waiting import wait_until

from frontend.storage.owners import new_id

ENDED = ("completed", "failed", "expired", "cancelled")
CHAT = "/v1/chat/completions"
STEP_MS = 20


def request(number: int, url: str = CHAT, tokens: int = 3, **body: Any) -> dict[str, Any]:
    content = {"messages": [{"role": "user", "content": f"text {number}"}], "max_tokens": tokens}
    return {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": {"model": "lmi", **content, **body}}


def in_lines(requests: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in requests)


def begun(client: Any, data: bytes, url: str = CHAT, window: str = "24h") -> Any:
    """Upload an input and begin a batch of it."""
    file = client.files.create(file=("requests.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window=window)


def ended(client: Any, batch: Any) -> Any:
    """Return a batch once it has ended."""
    found: list[Any] = [batch]

    def ask() -> bool:
        found[:] = [client.batches.retrieve(batch.id)]
        return found[0].status in ENDED

    wait_until(ask, "the batch has ended")
    return found[0]


def answers(client: Any, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def ids(lines: Sequence[dict[str, Any]]) -> list[str]:
    return sorted(line["custom_id"] for line in lines)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("batches")
    variables = {
        "SERVING_BATCHES_STORE": str(store),
        "SERVING_API_KEYS": ",".join(KEYS),
        "SERVING_BATCHES_MAX_FILE_SIZE": "100000",
        "SERVING_BATCHES_MAX_REQUESTS": "100",
    }
    with running(make_model(directory / "model", echo_delay_ms=STEP_MS), variables=variables, workers=1) as server:
        yield server


def test_a_batch_is_answered(server: Server) -> None:
    client = client_of(server)
    data = in_lines([request(number) for number in range(20)])
    file = client.files.create(file=("requests.jsonl", data), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("requests.jsonl", len(data), "batch")
    assert client.files.content(file.id).read() == data
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"name": "value"}
    )
    assert (batch.status, batch.metadata) == ("validating", {"name": "value"})
    done = ended(client, batch)
    counts = done.request_counts
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 20, 20, 0)
    lines = answers(client, done.output_file_id)
    assert ids(lines) == sorted(f"id-{number}" for number in range(20))
    for line in lines:
        number = line["custom_id"].removeprefix("id-")
        assert line["response"]["status_code"] == 200
        assert number in line["response"]["body"]["choices"][0]["message"]["content"]
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    assert batch.id in [each.id for each in client.batches.list(limit=100).data]
    assert client.files.delete(file.id).deleted


@pytest.mark.parametrize(
    ("url", "body", "path"),
    [
        ("/v1/completions", {"prompt": "a fox"}, ("choices", 0, "text")),
        ("/v1/responses", {"input": "a fox", "max_output_tokens": 3}, ("output", 0, "content", 0, "text")),
    ],
)
def test_other_endpoints(server: Server, url: str, body: dict[str, Any], path: tuple[Any, ...]) -> None:
    client = client_of(server)
    line = {"custom_id": "x", "method": "POST", "url": url, "body": {"model": "lmi", **body}}
    done = ended(client, begun(client, in_lines([line]), url))
    found = answers(client, done.output_file_id)[0]["response"]["body"]
    for part in path:
        found = found[part]
    assert "a fox" in found


def test_errors_of_lines_are_in_a_file_of_their_own(server: Server) -> None:
    client = client_of(server)
    wrong = [request(0, temperature="hot"), request(1, model="unknown"), request(2)]
    done = ended(client, begun(client, in_lines(wrong)))
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 1, 2)
    assert ids(answers(client, done.output_file_id)) == ["id-2"]
    lines = {line["custom_id"]: line["response"] for line in answers(client, done.error_file_id)}
    assert {name: response["status_code"] for name, response in lines.items()} == {"id-0": 400, "id-1": 404}
    assert "temperature" in lines["id-0"]["body"]["error"]["message"]


HOSTILE = {
    "no JSON": (b"{nothing", "invalid_json_line"),
    "not UTF-8": (in_lines([request(0)]).replace(b"text", b"\xff"), "invalid_json_line"),
    "NaN": (in_lines([request(0, temperature=0.5)]).replace(b"0.5", b"NaN"), "invalid_json_line"),
    "a list": (b"[1]\n", "invalid_json_line"),
    "deep": (b'{"a":' * 5000 + b"1" + b"}" * 5000, "invalid_json_line"),
    "no id": (b'{"url": "/v1/chat/completions", "body": {}}', "invalid_json_line"),
    "an empty id": (in_lines([{**request(0), "custom_id": ""}]), "invalid_custom_id"),
    "one id twice": (in_lines([request(0), request(1), request(0)]), "duplicate_custom_id"),
    "another endpoint": (in_lines([request(0, "/v1/completions")]), "mismatched_url"),
    "an address": (in_lines([request(0, "http://169.254.169.254/")]), "invalid_url"),
    "a stream": (in_lines([request(0, stream=True)]), "stream_not_supported"),
    "GET": (in_lines([{**request(0), "method": "GET"}]), "invalid_method"),
    "nothing": (b"\n \n", "empty_file"),
    "empty": (b"", "empty_file"),
    "too many": (b"\n" * 101, "too_many_requests"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_wrong_input_fails_the_batch_with_its_line(server: Server, what: str) -> None:
    client = client_of(server)
    data, code = HOSTILE[what]
    done = ended(client, begun(client, data))
    assert (done.status, done.errors.data[0].code) == ("failed", code)
    assert done.output_file_id is done.error_file_id is None
    if what == "one id twice":
        assert done.errors.data[0].line == 3


def test_a_key_sees_nothing_of_another(server: Server) -> None:
    import openai

    first, second = (client_of(server, key) for key in KEYS)
    batch = begun(first, in_lines([request(0)]))
    done = ended(first, batch)
    for call in (
        lambda: second.files.retrieve(batch.input_file_id),
        lambda: second.files.content(done.output_file_id),
        lambda: second.files.delete(done.output_file_id),
        lambda: second.batches.retrieve(batch.id),
        lambda: second.batches.cancel(batch.id),
        lambda: second.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    assert (second.files.list().data, second.batches.list().data) == ([], [])
    assert httpx.get(f"http://127.0.0.1:{server.port}/v1/files").status_code == 401


def test_a_cancelled_batch_keeps_what_is_answered(server: Server) -> None:
    import openai

    client = client_of(server)
    batch = begun(client, in_lines([request(number, tokens=5 + 20 * number) for number in range(90)]))
    wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 2, "some lines are answered")
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch)
    assert (done.status, done.request_counts.total) == ("cancelled", 90)
    lines = answers(client, done.output_file_id)
    assert 2 <= len(lines) == done.request_counts.completed < 90
    assert len(set(ids(lines))) == len(lines)
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.batches.cancel(batch.id)


def test_what_is_not_answered_in_time_expires(server: Server) -> None:
    client = client_of(server)
    batch = begun(client, in_lines([request(0, tokens=1), request(1, tokens=5000)]), window="2s")
    done = ended(client, batch)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("expired", 1, 1)
    (line,) = answers(client, done.error_file_id)
    assert (line["custom_id"], line["error"]["code"], line["response"]) == ("id-1", "batch_expired", None)


def test_a_batch_without_its_file_fails(server: Server, store: Path) -> None:
    client = client_of(server)
    file = client.files.create(file=("x", in_lines([request(0)])), purpose="batch")
    content = next(store.glob(f"*/contents/{file.id}"))
    content.unlink()
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="1h")
    done = ended(client, batch)
    assert (done.status, done.errors.data[0].code) == ("failed", "input_file_gone")


PATHS = ("../../etc/passwd", "..", "a\0b", "file-" + "0" * 31, "batch_" + "1a" * 15 + "1", "%2e%2e%2f", "x" * 5000)


@pytest.mark.parametrize("name", PATHS)
def test_no_id_leads_out_of_the_store(server: Server, name: str) -> None:
    quoted = "".join(f"%{byte:02x}" for byte in name.encode())
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    for path in (f"/v1/files/{quoted}", f"/v1/files/{quoted}/content", f"/v1/batches/{quoted}"):
        assert server.http.get(path, headers=headers).status_code == 404, path
    body = {"input_file_id": name, "endpoint": CHAT, "completion_window": "24h"}
    assert server.http.post("/v1/batches", json=body, headers=headers).status_code == 404


@pytest.mark.parametrize("name", ["../../../tmp/x", "\r\nx: y", 'a"b', "\u202e", "n" * 3000])
def test_the_name_of_an_upload_is_only_shown(server: Server, name: str) -> None:
    client = client_of(server)
    file = client.files.create(file=(name, b"{}"), purpose="batch")
    assert client.files.retrieve(file.id).filename.isprintable()
    client.files.delete(file.id)


def test_uploads_that_are_refused(server: Server, store: Path) -> None:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    post = server.http.post
    assert post("/v1/files", content=b"x", headers=headers).status_code == 400
    assert post("/v1/files", files={"file": b"x"}, headers=headers).status_code == 400
    other = post("/v1/files", files={"file": b"x"}, data={"purpose": "vision"}, headers=headers)
    assert (other.status_code, "purpose is vision" in other.text) == (400, True)
    assert post("/v1/files", data={"purpose": "batch", "x": "y" * 9000}, headers=headers).status_code == 400
    large = post("/v1/files", files={"file": b"x" * 100_001}, data={"purpose": "batch"}, headers=headers)
    assert (large.status_code, "batches_max_file_size" in large.text) == (413, True)
    assert not list(store.glob(".tmp/*")), "nothing of them is left"


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "/v1/models"},
        {"completion_window": "0h"},
        {"completion_window": "99d"},
        {"metadata": {"a": "b" * 600}},
    ],
)
def test_batches_that_are_refused(server: Server, wrong: dict[str, Any]) -> None:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    body = {"input_file_id": new_id("file-"), "endpoint": CHAT, "completion_window": "24h", **wrong}
    answer = server.http.post("/v1/batches", json=body, headers=headers)
    assert answer.status_code in (400, 404)
    assert server.http.post("/v1/batches", content=b"[" * 9000, headers=headers).status_code == 400


def test_a_client_that_leaves_during_its_upload_leaves_nothing(server: Server, store: Path) -> None:
    import socket

    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            f"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[0]}\r\ncontent-length: 90000\r\n"
            'content-type: multipart/form-data; boundary=b\r\n\r\n--b\r\ncontent-disposition: form-data; name="file"'
            "\r\n\r\nxx".encode()
        )
        wait_until(lambda: list(store.glob(".tmp/*")), "the upload has begun")
    wait_until(lambda: not list(store.glob(".tmp/*")), "the upload is given up")


# --- sudden ends ---


def slow_server(directory: Path, store: str, **variables: str) -> contextlib.AbstractContextManager[Server]:
    model = directory / "model"
    if not model.exists():
        make_model(model, echo_delay_ms=STEP_MS)
    return running(model, variables={"SERVING_BATCHES_STORE": store, **variables})


def until_longer(journal: Path, lines: int) -> None:
    wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") > lines, f"{lines} lines")


@pytest.mark.slow
def test_a_killed_server_leaves_each_line_once(tmp_path: Path) -> None:
    """Three servers are killed in the middle of a batch, and the fourth ends it."""
    store = tmp_path / "store"
    data = in_lines([request(number, tokens=5 + number % 40) for number in range(300)])
    before: set[bytes] = set()
    batch: Any = None
    for least in (5, 60, 120):
        with slow_server(tmp_path, str(store), SERVING_BATCHES_CONCURRENCY="16") as server:
            client = client_of(server)
            batch = batch or begun(client, data)
            journal = store / "all" / "journals" / batch.id
            until_longer(journal, least)
            server.process.kill()
            server.ended()
        kept = {line.split(b" ", 2)[2] for line in journal.read_bytes().split(b"\n")[:-1]}
        assert before <= kept, "what was answered stays"
        before = kept
        with journal.open("ab") as file:
            file.write(b'7 o {"half": "a li')  # as if the machine had ended in the middle of a write
    with slow_server(tmp_path, str(store)) as server:
        client = client_of(server)
        done = ended(client, batch)
        assert (done.status, done.request_counts.completed) == ("completed", 300)
        text = client.files.content(done.output_file_id).read()
        lines = [json.loads(line) for line in text.splitlines()]
    assert ids(lines) == sorted(f"id-{number}" for number in range(300))
    assert before <= set(text.splitlines()), "no line is answered again"


@pytest.mark.slow
def test_a_server_that_ends_leaves_its_batches_to_the_next(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    data = in_lines([request(number, tokens=10 + number) for number in range(60)])
    with slow_server(tmp_path, store) as server:
        client = client_of(server)
        batch = begun(client, data)
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed, "a line is answered")
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 15, "lines are not waited for"
    with slow_server(tmp_path, store) as server:
        done = ended(client_of(server), batch)
        assert ids(answers(client_of(server), done.output_file_id)) == sorted(f"id-{number}" for number in range(60))


@pytest.mark.slow
def test_two_servers_share_a_store(tmp_path: Path) -> None:
    """Either answers for all batches, each batch runs on one, and one takes over what a killed one leaves."""
    store = str(tmp_path / "store")
    data = in_lines([request(number, tokens=5 + number % 20) for number in range(100)])
    with slow_server(tmp_path, store) as first, slow_server(tmp_path, store) as second:
        clients = [client_of(first), client_of(second)]
        batches = [begun(clients[number % 2], data) for number in range(6)]
        wait_until(lambda: clients[0].batches.retrieve(batches[0].id).request_counts.completed, "one runs")
        first.process.kill()
        first.ended()
        for batch in batches:
            done = ended(clients[1], batch)
            assert (done.status, done.request_counts.completed) == ("completed", 100)
            assert ids(answers(clients[1], done.output_file_id)) == sorted(f"id-{number}" for number in range(100))


@pytest.mark.slow
def test_a_store_on_s3(tmp_path: Path) -> None:
    """The next server goes on where one has ended; each line is there once."""
    with s3_server(tmp_path / "home") as s3:
        place = f"s3://{BUCKET}/some/prefix"
        data = in_lines([request(number, tokens=5 + number % 30) for number in range(80)])
        with slow_server(tmp_path, place, **s3.variables) as server:
            client = client_of(server)
            batch = begun(client, data)
            wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 5, "some lines")
            assert server.stop() == 0
        with slow_server(tmp_path, place, **s3.variables) as server:
            client = client_of(server)
            done = ended(client, batch)
            assert (done.status, done.request_counts.completed) == ("completed", 80)
            assert ids(answers(client, done.output_file_id)) == sorted(f"id-{number}" for number in range(80))
            client.files.delete(batch.input_file_id)
            unfinished = {"Bucket": BUCKET, "Prefix": "some/prefix/all/unfinished/"}  # the last that is removed
            wait_until(lambda: not s3.client.list_objects_v2(**unfinished)["KeyCount"], "no mark is left")
        keys = [each["Key"] for each in s3.client.list_objects_v2(Bucket=BUCKET)["Contents"]]
        assert not [key for key in keys if "/journals/" in key or "/unfinished/" in key]
        assert all(key.startswith("some/prefix/all/") for key in keys)


# --- live requests ---


@pytest.mark.slow
def test_lines_give_way_to_other_requests(tmp_path: Path) -> None:
    """With one place in the worker, lines leave it at once for a request, and are answered all the same."""
    model = make_model(tmp_path / "model", echo_delay_ms=10, max_rolling_batch_size=4, job_queue_size=8)
    with running(model, variables={"SERVING_BATCHES_STORE": str(tmp_path / "store")}) as server:
        client = client_of(server)
        batch = begun(client, in_lines([request(number, tokens=300) for number in range(12)]))
        server.until("lmi_requests_in_flight", 4)
        threads = [threading.Thread(target=server.invoke, args=("a b", 5)) for _ in range(3)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = time.monotonic() - began
        done = ended(client, batch)
    assert took_s < 2.5, "a line takes 3 seconds"
    assert (done.request_counts.completed, done.request_counts.failed) == (12, 0)


def test_without_a_store_there_are_no_such_paths(tmp_path: Path) -> None:
    with running(make_model(tmp_path / "model")) as server:
        unset = server.http.get("/v1/batches")
        assert (unset.status_code, "the setting batches_store switches it on" in unset.text) == (404, True)
        assert "batches_store" not in server.http.get("/v1/batchesque").text
        assert server.http.post("/v1/files").status_code == 404


@pytest.mark.slow
def test_a_store_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    command = [sys.executable, "-m", "lmi_server", "serve", str(make_model(tmp_path / "model"))]
    variables = os.environ | {"SERVING_BATCHES_STORE": f"{file}/x", "SERVING_PORT": "0"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode, done.stderr
    assert "batches_store" in done.stderr
