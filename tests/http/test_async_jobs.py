"""Requests with `x-synchronous: false`, and their answers in pages, from memory and from each store."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from relay_helpers import on_loop
from server_helpers import Server, make_model, request, running
from waiting import wait_until

from frontend.detached.request import DetachedRequest
from frontend.http.held_bytes import HeldBytes
from frontend.sagemaker.async_jobs import AsyncJobs, _Job
from frontend.sagemaker.job_store import (
    DirectoryStore,
    DynamoStore,
    JobRecord,
    JobStore,
    S3Store,
    job_store,
    memory_for_answers,
)
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import ConfigurationError

KEY = "user-key-0123456789"
START = {"x-synchronous": "false"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve two models with at most three jobs."""
    directory = tmp_path_factory.mktemp("jobs")
    slow = make_model(directory / "slow", echo_delay_ms=20, job_queue_size=1, max_rolling_batch_size=4)
    with running(make_model(directory / "model"), slow, variables={"SERVING_MEMORY_CACHE_CAPACITY": "3"}) as server:
        for _ in range(2):
            server.log_line(r"\] ready: process")
        yield server


def started(server: Server, tokens: int = 3, stream: bool = False, model: str = "model", **headers: str) -> str:
    """Start a job and return its token."""
    body = request("a b c", tokens, stream)
    answer = server.http.post(f"/predictions/{model}", json=body, headers={**START, **headers})
    assert (answer.status_code, answer.content) == (200, b"")
    token = answer.headers["x-next-token"]
    assert answer.headers["x-amzn-sagemaker-custom-attributes"] == f"x-next-token={token}"
    return token


def page(server: Server, token: str, **headers: str) -> httpx.Response:
    return server.http.post("/predictions/model", headers={"x-starting-token": token, **headers})


def finished(server: Server, token: str) -> httpx.Response:
    """Return the whole answer of a job, once it has ended."""
    answers: list[httpx.Response] = []

    def ask() -> bool:
        answers[:] = [page(server, token)]
        return "x-next-token" not in answers[0].headers

    wait_until(ask, "the job has ended")
    return answers[0]


def end(server: Server, token: str) -> httpx.Response:
    return server.http.delete("/predictions/model", headers={"x-starting-token": token})


def test_a_job_answers_later(server: Server) -> None:
    token = started(server)
    answer = finished(server, token)
    assert (answer.status_code, answer.json()) == (200, {"generated_text": " a b c"})
    assert (answer.headers["content-type"], answer.headers["pragma"]) == ("application/json", "no-cache")
    assert finished(server, token).json() == answer.json(), "it can be read again"
    assert end(server, token).status_code == 200


def test_a_stream_is_read_in_pages(server: Server) -> None:
    token = started(server, 40, stream=True, model="slow")
    begin = page(server, token)
    assert begin.status_code in (200, 202)
    if begin.status_code == 202:
        assert begin.reason_phrase == "The model result is not yet available"
    whole = finished(server, token).content
    assert whole.count(b'"token"') == 40
    read, pages, following = b"", 0, token
    while following:
        answer = page(server, following, **{"x-max-items": "5"})
        following = answer.headers.get("x-next-token", "")
        assert answer.content.count(b"\n") == 5, "an item is what the model sent at a time"
        read, pages = read + answer.content, pages + 1
        assert answer.headers["content-type"] == "application/jsonlines"
    assert read == whole
    assert pages == 40 / 5
    end(server, token)


def test_what_the_model_sends_at_once_is_still_counted_one_by_one(server: Server) -> None:
    token = started(server, 40, stream=True)
    finished(server, token)
    pages: list[bytes] = []
    following = token
    while following:
        answer = page(server, following, **{"x-max-items": "1"})
        following = answer.headers.get("x-next-token", "")
        pages.append(answer.content)
    assert [part.count(b"\n") for part in pages] == [1] * 40
    end(server, token)


def test_a_whole_answer_is_one_item_however_long_it_is(server: Server) -> None:
    body = {"inputs": "a" * 400_000, "parameters": {"max_new_tokens": 1}}
    token = server.http.post("/predictions/model", json=body, headers=START).headers["x-next-token"]
    finished(server, token)
    answer = page(server, token, **{"x-max-items": "1"})
    assert ("x-next-token" in answer.headers, len(answer.json()["generated_text"])) == (False, 400_001)
    end(server, token)


def test_an_attribute_starts_a_job_too(server: Server) -> None:
    attributes = {"x-amzn-sagemaker-custom-attributes": "x-synchronous=false; other=1"}
    answer = server.http.post("/invocations?model_name=model", json=request("a"), headers=attributes)
    token = answer.headers["x-next-token"]
    named = {"x-amzn-sagemaker-custom-attributes": f"x-starting-token={token}"}
    wait_until(lambda: server.http.post("/predictions/model", headers=named).status_code == 200, "it has ended")
    end(server, token)


def test_what_no_queue_takes_is_refused_at_once(server: Server) -> None:
    unknown = server.http.post("/predictions/none", json=request("a"), headers=START)
    assert (unknown.status_code, unknown.json()["type"]) == (404, "ModelNotFoundException")
    other = server.http.post("/predictions/model", json=request("a"), headers={"x-synchronous": "true"})
    assert other.json() == {"generated_text": " a a a"}


def test_an_error_of_the_model_is_the_answer(server: Server) -> None:
    answer = server.http.post("/predictions/model", content=b"{", headers=START)
    failed = finished(server, answer.headers["x-next-token"])
    assert (failed.status_code, failed.json()["type"]) == (424, "BadRequestException")
    end(server, answer.headers["x-next-token"])


@pytest.mark.parametrize("token", ["x", "00000000-0000-0000-0000-000000000000", "../../etc/passwd", ""])
def test_an_unknown_token_is_refused(server: Server, token: str) -> None:
    for answer in (page(server, token), end(server, token)):
        assert answer.status_code == 400
        assert answer.json()["message"] == f"Invalid x-starting-token: {token}"


def test_a_page_has_a_number_of_items(server: Server) -> None:
    token = started(server)
    answer = page(server, token, **{"x-max-items": "many"})
    assert (answer.status_code, "x-max-items" in answer.json()["message"]) == (400, True)
    end(server, token)


def test_a_job_that_is_ended_frees_what_it_held(server: Server) -> None:
    token = started(server, 1_000_000, stream=True, model="slow")
    server.until("lmi_requests_in_flight", 1, "slow")
    assert end(server, token).status_code == 200
    server.until("lmi_requests_in_flight", 0, "slow")
    assert page(server, token).status_code == 400


def test_jobs_have_a_limit_and_answers_that_were_read_make_room(server: Server) -> None:
    tokens = [started(server, 1_000_000, stream=True, model="slow") for _ in range(2)]
    tokens.append(started(server))
    refused = server.http.post("/predictions/model", json=request("a"), headers=START)
    assert (refused.status_code, "memory_cache_capacity=3" in refused.json()["message"]) == (503, True)
    assert finished(server, tokens[2]).status_code == 200
    tokens[2] = started(server)
    for token in tokens:
        assert end(server, token).status_code == 200


@pytest.mark.slow
def test_answers_outlive_the_server_and_those_that_it_took_with_it_are_told(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", echo_delay_ms=20)
    variables = {"SERVING_ASYNC_JOBS_DIR": str(tmp_path / "jobs"), "SERVING_API_KEYS": KEY}
    key = {"x-api-key": KEY}
    with running(model, variables=variables, workers=1) as server:
        assert server.http.post("/predictions/model", json=request("a"), headers=START).status_code == 401
        done, lost = started(server, **key), started(server, 1_000_000, True, **key)
        wait_until(lambda: "x-next-token" not in page(server, done, **key).headers, "the first job has ended")
        assert page(server, done).status_code == 401
        server.process.kill()
        server.ended()
    with running(model, variables=variables, workers=1) as server:
        assert page(server, done, **key).json() == {"generated_text": " a b c"}
        answer = page(server, lost, **key)
        assert (answer.status_code, "the server ended while the job ran" in answer.text) == (503, True)
        assert end(server, done).status_code == 401


@on_loop
async def test_the_end_of_an_answer_is_not_shown_before_it_is_stored(tmp_path: Path) -> None:
    saving, stored = threading.Event(), threading.Event()

    class SlowFakeStore(DirectoryStore):
        def save(self, token: str, record: JobRecord) -> None:
            saving.set()
            assert stored.wait(10)
            super().save(token, record)

    answers = memory_for_answers(ServerSettings())
    jobs = AsyncJobs(lambda *_: asyncio.sleep(0), None, None, ServerSettings(), answers)  # type: ignore[arg-type, return-value]
    jobs._store = SlowFakeStore(tmp_path)
    record = JobRecord(items=[b"answer"], status=200, finished=True, expires=time.time() + 60)
    job = jobs._jobs["token"] = _Job("token", record, DetachedRequest(record, HeldBytes(answers)))
    task = asyncio.create_task(jobs._save(job))
    await asyncio.to_thread(saving.wait, 10)
    last = asyncio.create_task(jobs._page("token", 0, None))
    await asyncio.sleep(0.1)
    was_shown = last.done()
    stored.set()
    await task
    assert (was_shown, bytes((await last)[1].body)) == (False, b"answer")


# --- stores ---


@pytest.fixture(scope="module")
def aws() -> Iterator[None]:
    from moto import mock_aws

    names = {"AWS_DEFAULT_REGION": "eu-west-1", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    with mock_aws():
        yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(params=["directory", "s3", "dynamodb"])
def store(request: Any, aws: None, tmp_path: Path) -> JobStore:
    settings = {
        "directory": {"async_jobs_dir": str(tmp_path / "jobs")},
        "s3": {"s3_cache": True, "s3_cache_bucket": "jobs", "s3_cache_key_prefix": "a/", "s3_cache_autocreate": True},
        "dynamodb": {"ddb_cache": True, "ddb_table_name": "jobs"},
    }
    made = job_store(ServerSettings(**settings[request.param]))
    assert isinstance(made, {"directory": DirectoryStore, "s3": S3Store, "dynamodb": DynamoStore}[request.param])
    return made


def test_a_store_keeps_answers_of_any_length(store: JobStore) -> None:
    token = "0" * 36
    assert store.load(token) is None
    store.save(token, JobRecord(owner="x", expires=time.time() + 60))
    begun = store.load(token)
    assert begun is not None
    assert not begun.finished
    headers = [("content-type", "text/plain")]
    whole = JobRecord(200, "", headers, [b"x" * 1_000_000, b"\xff\x00"], "x", True, time.time() + 60)
    store.save(token, whole)
    assert store.load(token) == whole
    store.remove(token)
    store.remove(token)
    assert store.load(token) is None


def test_a_directory_is_cleared_of_what_has_expired(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.save("old", JobRecord(expires=time.time() - 1))
    store.save("new", JobRecord(expires=time.time() + 60))
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_what_is_stored_may_be_broken(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    (tmp_path / "token").write_bytes(json.dumps({"status": "x"}).encode())
    with pytest.raises(OSError, match="no answer of a job"):
        store.load("token")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"s3_cache": True}, "s3_cache_bucket"),
        ({"ddb_cache": True, "async_jobs_dir": "/tmp/x"}, "set one"),
        ({"async_jobs_dir": "/proc/none"}, "async_jobs_dir"),
    ],
)
def test_settings_that_name_no_store_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        job_store(ServerSettings(**settings))
