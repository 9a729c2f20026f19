"""The whole server over HTTP: a real process with real workers, with the echo handler and handlers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import random
import re
import select
import signal
from collections.abc import Iterator

import httpx
import pytest
from relay_helpers import on_loop
from server_helpers import Server, connect, raw_request, received, request, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    variables = {"SERVING_MAX_REQUEST_SIZE": "100000", "SERVING_RESPONSE_READ_TIMEOUT": "2"}
    with serving(tmp_path_factory.mktemp("server"), max_rolling_batch_size=4, variables=variables) as server:
        yield server


# --- routes ---


@pytest.mark.parametrize("path", ["/invocations", "/predictions/model", "/models/model/invoke"])
def test_lmi_paths(server: Server, path: str) -> None:
    response = server.http.post(path, json=request("a b"))
    assert response.status_code == 200
    assert response.json() == {"generated_text": " a b a"}
    assert response.headers["content-length"] == str(len(response.content))
    assert len(response.headers["x-request-id"]) == 36
    assert response.headers["cache-control"].startswith("no-cache")


def test_openai_paths(server: Server) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "a b", "max_tokens": 2})
    assert response.json()["choices"][0]["text"] == " a b"
    response = server.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    models = server.http.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["model"]
    assert server.http.get("/v1/models/model").json()["id"] == "model"
    assert server.http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_a_stream_is_chunked(server: Server) -> None:
    with server.http.stream("POST", "/invocations", json=request("a b", 500, stream=True)) as response:
        assert response.headers["transfer-encoding"] == "chunked"
        assert len(list(response.iter_lines())) == 500


def test_the_request_id_comes_back(server: Server) -> None:
    assert server.invoke("a", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"


@pytest.mark.parametrize("path", ["/ping", "/ping/", "/ping/any/thing"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_ping(server: Server, method: str, path: str) -> None:
    response = server.http.request(method, path)
    assert (response.status_code, response.json()) == (200, {"model": {"status": "Healthy"}})


@pytest.mark.parametrize("path", ["/ping", "/models", "/metrics", "/v1/models", "/nope", "/v1/completions", "/"])
def test_every_answer_has_an_id_and_is_not_cached(server: Server, path: str) -> None:
    response = server.http.get(path)
    assert len(response.headers["x-request-id"]) == 36
    assert response.headers["pragma"] == "no-cache"
    assert server.http.get(path, headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("path", ["/invocations", "/predictions/model", "/models/model/invoke"])
def test_other_methods_run_the_model_too(server: Server, method: str, path: str) -> None:
    response = server.http.request(method, path, json=request("a b"))
    assert (response.status_code, response.json()) == (200, {"generated_text": " a b a"})


def test_options(server: Server) -> None:
    for path in ("/", "/invocations", "/predictions/model", "/invocations/"):
        response = server.http.options(path)
        assert (response.status_code, response.json()) == (200, {})
    assert server.http.options("/predictions/other").status_code == 404


def test_metrics_count_by_code(server: Server) -> None:
    server.invoke("a")
    text = server.http.get("/metrics").text
    assert re.search(r'lmi_requests_total{code="200",model="model"} \d', text)
    assert re.search(r'lmi_request_duration_seconds_bucket{le="0.005",model="model"} \d', text)
    assert re.search(r'lmi_queue_time_seconds_count{model="model"} \d', text)
    assert re.search(r'lmi_time_to_first_byte_seconds_count{model="model"} \d', text)
    assert 'lmi_workers_ready{model="model"} 1.0' in text


def test_query_header_and_custom_attribute_name_the_model(server: Server) -> None:
    body = request("a")
    attributes = {"X-Amzn-SageMaker-Custom-Attributes": "model_name=other;b=2"}
    assert server.http.post("/invocations?model_name=model", json=body).status_code == 200
    for response in (
        server.http.post("/invocations?model_name=other", json=body),
        server.http.post("/invocations", json=body, headers={"model_name": "other"}),
        server.http.post("/invocations", json=body, headers=attributes),
    ):
        assert response.status_code == 404
        assert response.json()["message"] == "Model or workflow not found: other"


# --- errors ---


def test_errors_are_json_and_keep_the_connection(server: Server) -> None:
    calls: list[tuple[int, httpx.Response]] = [
        (404, server.http.post("/predictions/other", json=request("a"))),
        (404, server.http.post("/predictions/model/2", json=request("a"))),
        (404, server.http.get("/no/such/path")),
        (405, server.http.get("/v1/completions")),
        (405, server.http.patch("/models")),
        (424, server.http.post("/invocations", content=b"{")),
        (424, server.invoke("refuse")),
        (424, server.invoke("raise")),
        (424, server.invoke("a", headers={"x-priority": "soon"})),
    ]
    for status, response in calls:
        assert response.status_code == status
        assert response.json().get("code", status) == status
        assert "connection" not in response.headers
    assert calls[3][1].headers["allow"] == "OPTIONS, POST"
    assert calls[4][1].headers["allow"] == "GET, POST"
    assert server.http.get("/v1/nope").json()["error"]["code"] == "unknown_url"
    assert server.invoke("a").status_code == 200


def test_a_body_over_the_limit_closes(server: Server) -> None:
    response = server.http.post("/invocations", content=b"x" * 100_001)
    assert (response.status_code, response.json()["code"]) == (413, 413)
    assert response.headers["connection"] == "close"


def test_a_body_that_grows_over_the_limit(server: Server) -> None:
    response = server.http.post("/invocations", content=(b"x" * 10_000 for _ in range(11)))
    assert response.status_code == 413
    assert "max_request_size=100000" in response.json()["message"]


def test_a_body_under_the_limit_in_pieces(server: Server) -> None:
    body = json.dumps(request("a" * 90_000, 1)).encode()
    response = server.http.post("/invocations", content=(body[start : start + 999] for start in range(0, 90_999, 999)))
    assert response.json() == {"generated_text": " " + "a" * 90_000}


@pytest.mark.parametrize(("length", "status", "closes"), [(2, b"100 Continue", False), (70_000, b"404", True)])
def test_a_refused_request_is_asked_for_a_short_body_only(
    server: Server, length: int, status: bytes, closes: bool
) -> None:
    head = b"POST /predictions/nope HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % length
    with connect(server, head) as connection:
        first = received(connection, b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 " + status)
        assert (b"connection: close" in first) == closes
        if not closes:
            connection.sendall(b"{}" + raw_request("a", close=True))
            assert received(connection).count(b"HTTP/1.1 ") == 2


@pytest.mark.parametrize(("version", "status"), [("1.2", b"200"), ("2.0", b"505"), ("3.1", b"505")])
def test_versions_of_http(server: Server, version: str, status: bytes) -> None:
    with connect(server, f"GET /ping HTTP/{version}\r\nhost: x\r\nconnection: close\r\n\r\n".encode()) as connection:
        assert received(connection).startswith(b"HTTP/1.1 " + status)


def test_an_unknown_path_below_v1_reads_in_both_forms(server: Server) -> None:
    body = server.http.get("/v1/nope").json()
    assert (body["code"], body["type"], body["error"]["message"]) == (404, "ResourceNotFoundException", body["message"])


def test_expect_continue_over_the_limit_closes(server: Server) -> None:
    head = b"POST /invocations HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 100001\r\n\r\n"
    with connect(server, head) as connection:
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer


def test_bytes_that_are_not_http(server: Server) -> None:
    with connect(server, b"what is this\r\n\r\n") as connection:
        head, _, body = received(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["message"] == "Invalid HTTP message."


@pytest.mark.parametrize(
    "head",
    [
        b"POST /invocations HTTP/1.1\r\nx-long: " + b"x" * 70_000 + b"\r\n\r\n",
        b"POST /invocations HTTP/1.1\r\n" + b"x-many: 1\r\n" * 7_000 + b"\r\n",
        b"POST /invocations?x=" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_a_head_over_the_limit(server: Server, head: bytes) -> None:
    with connect(server, head) as connection:
        answer, _, body = received(connection).partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in answer
    assert json.loads(body)["code"] == 431


def test_a_head_over_the_limit_that_begins_in_the_read_of_an_earlier_request(server: Server) -> None:
    many = (b"x-many: " + b"1" * 240 + b"\r\n") * 300
    long_head = raw_request("b", close=True).replace(b"host: x\r\n", many)
    with connect(server, raw_request("a") + long_head[:60_000]) as connection:
        assert b'" a' in received(connection, until=b"}")
        connection.sendall(long_head[60_000:])
        assert received(connection).startswith(b"HTTP/1.1 431 ")


def test_a_head_without_an_end(server: Server) -> None:
    with connect(server, b"POST /invocations HTTP/1.1\r\nx-long: ") as connection, contextlib.suppress(OSError):
        while not select.select([connection], [], [], 0)[0]:
            connection.sendall(b"x" * 1000)
        assert connection.recv(13) == b"HTTP/1.1 431 "


def test_an_upgrade_is_not_taken_up(server: Server) -> None:
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    asked = raw_request("a").replace(b"host: x\r\n", b"host: x\r\n" + upgrade)
    with connect(server, asked + asked[:-5]) as connection:
        answer = received(connection, until=b"}")
        connection.sendall(asked[-5:] + raw_request("b", close=True))
        answer += received(connection)
    assert re.findall(rb'"generated_text":" (\w)', answer) == [b"a", b"a", b"b"]
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert b"upgrade" not in answer


def test_connect_is_refused(server: Server) -> None:
    with connect(server, b"CONNECT example.com:80 HTTP/1.1\r\nhost: x\r\n\r\n") as connection:
        assert received(connection).startswith(b"HTTP/1.1 400 ")


def test_a_client_of_http_1_0(server: Server) -> None:
    with connect(server, raw_request("a b", 5, stream=True).replace(b"HTTP/1.1", b"HTTP/1.0")) as connection:
        head, _, body = received(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert len([json.loads(line) for line in body.splitlines()]) == 5
    for asked in (raw_request("a").replace(b"HTTP/1.1", b"HTTP/1.0"), b"GET /ping HTTP/1.0\r\n\r\n"):
        with connect(server, asked) as connection:
            head, _, body = received(connection).partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        assert len(body) == int(length[1])


def test_bytes_after_a_request_do_not_enter_its_answer(server: Server) -> None:
    with connect(server, raw_request("a", 2000) + b"junk\r\n\r\n") as connection:
        head, _, body = received(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(body) == {"generated_text": " a" * 2000}
    with connect(server, raw_request("token-then-wait", stream=True)) as connection:
        start = received(connection, until=b'"token"')
        connection.sendall(b"junk\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            start += received(connection)
    assert start.count(b"HTTP/1.1 ") == 1
    server.until("lmi_requests_in_flight", 0)


def test_a_chunked_body_that_is_broken(server: Server) -> None:
    head = b"POST /invocations HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    with connect(server, head + b"zz\r\n") as connection:
        assert received(connection).startswith(b"HTTP/1.1 400 ")
    server.until("lmi_requests_in_flight", 0)


# --- what clients send ---


def test_custom_attributes_do_not_replace_headers(server: Server) -> None:
    attributes = {"X-Amzn-SageMaker-Custom-Attributes": "content-length=abc;expect=x;content-type=text/csv"}
    response = server.invoke("a", headers=attributes)
    assert (response.status_code, response.json()) == (200, {"generated_text": " a a a"})


def test_a_query_parameter_is_not_the_body(server: Server) -> None:
    assert server.http.post("/invocations?data=zzz", json=request("a")).json() == {"generated_text": " a a a"}


def test_a_slash_at_the_end(server: Server) -> None:
    for path in ("/invocations/", "/predictions/model/", "/v1/completions/"):
        assert server.http.post(path, json=request("a") if "v1" not in path else {"prompt": "a"}).status_code == 200
    assert server.http.get("/ping/").status_code == 200


def test_options_of_the_server(server: Server) -> None:
    with connect(server, b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n") as connection:
        assert received(connection).startswith(b"HTTP/1.1 200 ")


def test_an_error_after_the_first_byte_ends_the_stream_properly(server: Server) -> None:
    response = server.invoke("token-then-raise", stream=True)
    assert response.status_code == 200
    assert "raised after a token" in json.loads(response.text.splitlines()[-1])["error"]


# --- clients that leave ---


@pytest.mark.parametrize(("prompt", "stream"), [("wait", False), ("wait", True), ("token-then-wait", True)])
def test_a_client_that_leaves_frees_its_place(server: Server, prompt: str, stream: bool) -> None:
    connections = [connect(server, raw_request(prompt, stream=stream)) for _ in range(6)]
    server.until("lmi_requests_in_flight", 4)
    server.until("lmi_queue_depth", 2)
    server.until("lmi_handler_running_requests", 4)
    for connection in reversed(connections):
        connection.close()
    server.until("lmi_queue_depth", 0)
    server.until("lmi_requests_in_flight", 0)
    server.until("lmi_handler_running_requests", 0)
    assert server.invoke("a").status_code == 200


def test_a_client_that_leaves_while_it_sends(server: Server) -> None:
    with connect(server, raw_request("a")[:-5]):
        pass
    assert server.invoke("a").status_code == 200
    assert server.metric("lmi_requests_in_flight") == 0


def test_a_client_that_leaves_after_a_long_body(server: Server) -> None:
    with connect(server, raw_request("wait " + "x" * 90_000)):
        server.until("lmi_requests_in_flight", 1)
    server.until("lmi_requests_in_flight", 0)


def test_a_client_that_does_not_read_is_dropped(server: Server) -> None:
    with connect(server, raw_request("flood", stream=True)) as connection:
        server.log_line("a client has left .* unread for response_read_timeout=2 seconds")
        server.until("lmi_requests_in_flight", 0)
        with contextlib.suppress(ConnectionResetError):
            received(connection)
    assert server.invoke("a").status_code == 200


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    with connect(server, raw_request("a") + raw_request("b") + raw_request("c", close=True)) as connection:
        answer = received(connection)
    assert re.findall(rb'"generated_text":" (\w)', answer) == [b"a", b"b", b"c"]


# --- workers that die ---


def test_a_worker_that_dies_in_the_middle_of_a_stream(server: Server) -> None:
    response = server.invoke("token-then-exit", stream=True)
    assert response.status_code == 200
    first, last = response.text.splitlines()
    assert "token" in json.loads(first)
    assert "worker process ended" in json.loads(last)["error"]
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert server.http.post("/v1/chat/completions", json=chat).status_code == 200


def test_ping_reports_a_dead_worker(server: Server) -> None:
    killed = server.worker_pid()
    os.kill(killed, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    server.log_line(rf"process {killed} ")  # the gauge is 0 for an instant only
    response = server.http.get("/ping")
    assert response.status_code == 200
    assert response.json()["model"]["status"] in ("Unhealthy", "Healthy")
    server.until("lmi_workers_ready", 1)
    assert server.http.get("/ping").status_code == 200


def endings(response: bytes) -> int:
    """Return 1 for a response that is complete as HTTP counts; raise for one that is cut or carries too much."""
    head, _, body = response.partition(b"\r\n\r\n")
    assert re.match(rb"HTTP/1.1 (200|503) ", head), response[:200]
    length = re.search(rb"content-length: (\d+)", head)
    if length is not None:
        assert len(body) == int(length[1])
        return 1
    assert body.endswith(b"0\r\n\r\n"), response[-200:]
    return body.count(b"\r\n0\r\n\r\n")


async def call(port: int, choose: random.Random, limit: asyncio.Semaphore) -> int | None:
    """Return how many complete answers one request got; None if this client left."""
    async with limit:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        stream, tokens = choose.random() < 0.5, choose.choice([1, 20, 2000])
        writer.write(raw_request("a b c", tokens, stream, close=True))
        leaves = choose.random() < 0.3
        try:
            if leaves:
                await reader.read(choose.choice([1, 100, 10_000]) if choose.random() < 0.7 else 0)
                return None
            return endings(await reader.read())
        finally:
            writer.transport.abort()


@pytest.mark.slow
@on_loop
async def test_a_thousand_requests_with_disconnects_and_a_kill(server: Server) -> None:
    choose = random.Random(7)
    limit = asyncio.Semaphore(100)
    calls = [asyncio.create_task(call(server.port, choose, limit)) for _ in range(1000)]
    for done, finished in enumerate(asyncio.as_completed(calls)):
        await finished
        if done == 400:
            os.kill(server.worker_pid(), signal.SIGKILL)
    results = [task.result() for task in calls]
    assert set(results) == {1, None}
    server.until("lmi_requests_in_flight", 0)
    server.until("lmi_queue_depth", 0)
    server.until("lmi_handler_running_requests", 0)
    assert server.invoke("a").status_code == 200


@on_loop
async def test_a_killed_worker_costs_no_client_its_answer(server: Server) -> None:
    limit = asyncio.Semaphore(50)
    waiting = [asyncio.create_task(call(server.port, NeverLeaves(n), limit)) for n in range(50)]
    await asyncio.sleep(0)
    os.kill(server.worker_pid(), signal.SIGKILL)
    assert set(await asyncio.gather(*waiting)) == {1}
    server.until("lmi_workers_ready", 1)


class NeverLeaves(random.Random):
    """Asks for whole answers, and reads them to the end."""

    def random(self) -> float:
        return 0.9


# --- what clients send ---


def test_compressed_bodies(server: Server) -> None:
    body = json.dumps(request("a b")).encode()
    sent = server.http.post("/invocations", content=gzip.compress(body), headers={"content-encoding": "gzip"})
    assert (sent.status_code, sent.json()) == (200, {"generated_text": " a b a"})
    bomb = server.http.post("/invocations", content=gzip.compress(b" " * 100_001), headers={"content-encoding": "gzip"})
    assert (bomb.status_code, bomb.json()["type"]) == (413, "PayloadTooLargeException")
    other = server.http.post("/invocations", content=body, headers={"content-encoding": "br"})
    assert (other.status_code, other.headers["accept-encoding"]) == (415, "gzip, deflate")


@pytest.mark.parametrize("name", ["tgi", "dummy", "lmi", "model"])
def test_names_that_mean_the_only_model(server: Server, name: str) -> None:
    completion = {"model": name, "prompt": "a", "max_tokens": 1}
    assert server.http.post("/v1/completions", json=completion).status_code == 200


# --- text-generation-inference and vLLM ---


def test_paths_of_text_generation_inference(server: Server) -> None:
    body = request("a b", 2)
    assert server.http.post("/generate", json=body).json() == {"generated_text": " a b"}
    assert server.http.post("/", json=body).json() == [{"generated_text": " a b"}]
    for path, wish in (("/generate_stream", False), ("/", True)):
        stream = server.http.post(path, json={**body, "stream": wish})
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert json.loads(stream.text.split("\n\n")[-2].removeprefix("data:"))["generated_text"] == " a b"
    refused = server.http.post("/generate", json={"inputs": 5})
    assert (refused.status_code, refused.json()["error"]) == (424, refused.json()["message"])
    assert server.http.get("/health").status_code == 200
    info = server.http.get("/info").json()
    assert info["max_total_tokens"] == info["max_input_tokens"] + 1
    assert server.http.get("/info?model_name=other").status_code == 404
    assert server.http.get("/version").json() == {"version": info["version"]}


def test_the_hub_s_client_at_the_root(server: Server) -> None:
    from huggingface_hub import InferenceClient

    with InferenceClient(base_url=str(server.http.base_url)) as client:
        assert client.text_generation("a b", max_new_tokens=2) == " a b"
        assert list(client.text_generation("a b", max_new_tokens=2, stream=True)) == [" a", " b"]
        details = client.text_generation("a b", max_new_tokens=2, details=True).details
    assert (details.finish_reason, details.generated_tokens) == ("length", 2)
