"""The end of a server by SIGTERM, with work in progress that would never end: it ends in time, and all have an outcome.

Each test has a server of its own, whose requests get one second.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from artifact_helpers import BUCKET, S3, s3_server
from forked_servers import SCRIPT
from server_helpers import Server, connect, make_model, raw_request, received, running, serving
from waiting import wait_until

from frontend.sagemaker.job_store import DirectoryStore

pytestmark = pytest.mark.slow

DRAIN_S = 1
LIMIT_S = DRAIN_S + 2 + 10  # the last ten are for a machine that is busy
DRAIN = {"SERVING_DRAIN_TIMEOUT": str(DRAIN_S)}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("home")) as s3:
        yield s3


@pytest.fixture
def silent() -> Iterator[dict[str, str]]:
    """Return the environment of clients of an S3 that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def ends_in_time(server: Server) -> None:
    """Send SIGTERM, and check that the server ends with code 0 in time."""
    began = time.monotonic()
    server.process.terminate()
    assert server.ended() == 0
    assert time.monotonic() - began < LIMIT_S


def access_lines(server: Server) -> list[str]:
    """Return the lines of the access log of a server that has ended."""
    return [line for line in server.lines if '"log":"access"' in line]


def invoke_later(server: Server, prompt: str, **headers: str) -> str:
    """Send an asynchronous invocation; return the key of its failure."""
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 3}}
    answer = server.http.post("/endpoints/model/async-invocations", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    return answer.headers["x-amzn-sagemaker-failurelocation"].removeprefix(f"s3://{BUCKET}/")


def failure(s3: S3, key: str) -> str:
    return json.loads(s3.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())["message"]


def test_asynchronous_invocations_in_progress_have_failures_on_s3(s3: S3, tmp_path: Path) -> None:
    """One runs, one is in the queue, and two wait for a place in it."""
    variables = {**DRAIN, **s3.variables, "SERVING_ASYNC_OUTPUT_PATH": f"s3://{BUCKET}/out"}
    with serving(tmp_path, variables=variables, max_rolling_batch_size=1, job_queue_size=1) as server:
        keys = [invoke_later(server, "wait")]
        server.until("lmi_requests_in_flight", 1)
        keys.append(invoke_later(server, "wait"))
        server.until("lmi_queue_depth", 1)
        keys += [invoke_later(server, "wait") for _ in range(2)]
        ends_in_time(server)
    assert [failure(s3, key) for key in keys] == ["The server is shutting down"] * 4


def test_an_asynchronous_invocation_that_can_finish_has_its_output(s3: S3, tmp_path: Path) -> None:
    variables = {**s3.variables, "SERVING_ASYNC_OUTPUT_PATH": f"s3://{BUCKET}/finished"}
    with serving(tmp_path, variables=variables, echo_delay_ms=200) as server:
        key = invoke_later(server, "a b c").replace("-error", "")
        server.until("lmi_requests_in_flight", 1)
        server.process.terminate()
        assert server.ended() == 0
    assert json.loads(s3.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()) == {"generated_text": " a b c"}


def test_an_s3_that_never_answers_holds_nothing(silent: dict[str, str], tmp_path: Path) -> None:
    """The input of one invocation is never read, the output of another one never written."""
    variables = {**DRAIN, **silent, "SERVING_ASYNC_OUTPUT_PATH": "s3://models/out"}
    with serving(tmp_path, variables=variables) as server:
        location = {"x-amzn-sagemaker-inputlocation": "s3://models/in"}
        answer = server.http.post("/endpoints/model/async-invocations", headers=location)
        assert answer.status_code == 202
        invoke_later(server, "a", **{"x-amzn-sagemaker-inference-id": "lost-one"})
        server.until_positive("lmi_requests_total")
        ends_in_time(server)
        assert any("asynchronous invocation lost-one is lost" in line for line in server.lines)


def test_a_job_in_progress_has_a_stored_answer(tmp_path: Path) -> None:
    variables = {**DRAIN, "SERVING_ASYNC_JOBS_DIR": str(tmp_path / "jobs")}
    with serving(tmp_path, variables=variables) as server:
        answer = server.invoke("wait", headers={"x-synchronous": "false"})
        token = answer.headers["x-next-token"]
        ends_in_time(server)
    record = DirectoryStore(tmp_path / "jobs").load(token)
    assert record is not None
    assert (record.finished, record.status) == (True, 503)
    assert b"shutting down" in b"".join(record.items)


@pytest.mark.parametrize("header", ["", "x-synchronous: false\r\n"])
def test_a_body_that_never_ends_is_refused(tmp_path: Path, header: str) -> None:
    head = f"POST /invocations HTTP/1.1\r\nhost: x\r\n{header}content-length: 100\r\n\r\n{{"
    with serving(tmp_path, variables=DRAIN) as server, connect(server, head.encode()) as connection:
        server.invoke("a")
        ends_in_time(server)
        assert received(connection).startswith(b"HTTP/1.1 503 ")


def refusal(server: Server, path: str, **parameters: str) -> tuple[int, str]:
    """Have the server end during a call of the management API; return the status and the message of its answer."""
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(httpx.post, f"http://127.0.0.1:{server.port}{path}", params=parameters, timeout=60)
        if "url" in parameters:
            wait_until(lambda: parameters["model_name"] in server.http.get("/ping").json(), "it is being registered")
        else:
            server.log_line("an adapter loads")
        ends_in_time(server)
        answer = call.result()
    return answer.status_code, answer.json()["message"]


SHUTTING_DOWN = (503, "The server is shutting down")


def test_a_registration_whose_worker_loads(tmp_path: Path) -> None:
    gated = make_model(tmp_path / "gated", "fault_handlers:GatedHandler")
    with serving(tmp_path, variables=DRAIN) as server:
        assert refusal(server, "/models", url=str(gated), model_name="gated") == SHUTTING_DOWN


def test_a_registration_whose_model_is_downloaded(silent: dict[str, str], tmp_path: Path) -> None:
    with serving(tmp_path, variables={**DRAIN, **silent}) as server:
        assert refusal(server, "/models", url="s3://models/model/", model_name="remote") == SHUTTING_DOWN


def test_a_registration_whose_configuration_is_never_read(tmp_path: Path) -> None:
    """A thread that reads cannot be stopped."""
    (tmp_path / "stuck").mkdir()
    os.mkfifo(tmp_path / "stuck" / "never_read")
    with serving(tmp_path, variables=DRAIN) as server:
        assert refusal(server, "/models", url=str(tmp_path / "stuck"), model_name="stuck") == SHUTTING_DOWN


def test_the_interpreter_does_not_wait_for_a_thread_that_reads(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model")
    stuck = tmp_path / "stuck"
    stuck.mkdir()
    os.mkfifo(stuck / "never_read")
    command = [sys.executable, str(SCRIPT), str(directory)]
    with subprocess.Popen(command, env=os.environ | DRAIN, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port = next(found[1] for line in process.stderr if (found := re.search(r"listening on .*:(\d+)$", line)))
        parameters = {"url": str(stuck), "synchronous": "false"}
        assert httpx.post(f"http://127.0.0.1:{port}/models", params=parameters).status_code == 202
        began = time.monotonic()
        process.terminate()
        process.stderr.read()
        assert process.wait(60) == 0
        assert time.monotonic() - began < LIMIT_S


def test_an_adapter_that_loads(tmp_path: Path) -> None:
    with serving(tmp_path, variables=DRAIN, enable_lora="true") as server:
        parameters = {"name": "wait", "src": str(tmp_path)}
        assert refusal(server, "/models/model/adapters", **parameters) == SHUTTING_DOWN


def test_workers_that_load_or_hang(tmp_path: Path) -> None:
    """One worker of the start never loads its model, the other never returns from a request."""
    make_model(tmp_path / "store" / "gated", "fault_handlers:GatedHandler")
    make_model(tmp_path / "store" / "model")
    with running("--model-store", tmp_path / "store", variables=DRAIN) as server:
        server.log_line(r"model-0\] ready: process")
        body = raw_request("hang", path="/predictions/model")
        with connect(server, body) as connection:
            server.until("lmi_requests_in_flight", 1)
            ends_in_time(server)
            assert received(connection).startswith(b"HTTP/1.1 503 ")


def test_pages_of_the_console(tmp_path: Path) -> None:
    events = b"GET /console/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serving(tmp_path, variables=DRAIN) as server, connect(server, events) as connection:
        assert b" 200 " in received(connection, until=b"data:")
        ends_in_time(server)


def test_clients_that_do_not_read(tmp_path: Path) -> None:
    with (
        serving(tmp_path, variables=DRAIN) as server,
        connect(server, raw_request("flood", stream=True)) as connection,
    ):
        received(connection, until=b"x" * 1000)
        ends_in_time(server)


def test_a_second_signal_ends_what_a_thread_holds(tmp_path: Path) -> None:
    (tmp_path / "stuck").mkdir()
    os.mkfifo(tmp_path / "stuck" / "never_read")
    variables = {"SERVING_ACCESS_LOG": "json"}
    with serving(tmp_path, variables=variables) as server, connect(server, raw_request("wait")):
        parameters = {"url": str(tmp_path / "stuck"), "synchronous": "false"}
        assert server.http.post("/models", params=parameters).status_code == 202
        server.until("lmi_requests_in_flight", 1)
        assert server.invoke("hello").status_code == 200  # its line waits for others
        server.process.terminate()
        server.log_line("draining")
        threading.Timer(0.1, server.process.terminate).start()
        assert server.ended() == 1
        assert len(access_lines(server)) == 1


def test_a_loop_that_hangs_loses_no_line_of_the_access_log(tmp_path: Path) -> None:
    variables = {**DRAIN, "SERVING_ACCESS_LOG": "json"}
    with serving(tmp_path, variables=variables) as server, connect(server, raw_request("wait")):
        server.until("lmi_requests_in_flight", 1)
        assert server.invoke("hello").status_code == 200  # its line waits for others
        server.process.terminate()
        server.log_line("draining")
        os.kill(server.process.pid, signal.SIGUSR1)
        assert server.ended() == 1
        assert len(access_lines(server)) == 1
