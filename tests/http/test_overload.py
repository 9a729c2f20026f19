"""What the server does with more requests than it can serve: whom it refuses, and who waits for how long."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvloop
from server_helpers import Server, connect, make_model, raw_request, received, request, running

from benchmarks import overload

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "model": "quick"}
FLOOD, OTHER = "flood-key-0123456789", "other-key-0123456789"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve two models that take one request at a time; "quick" lets none wait once it knows its rate."""
    directory = tmp_path_factory.mktemp("overload")
    slow = {"echo_delay_ms": 20, "max_rolling_batch_size": 1}
    models = [
        make_model(directory / "patient", **slow, job_queue_size=4),
        make_model(directory / "quick", **slow, max_queue_delay_ms=1),
    ]
    with running(*models, variables={"SERVING_API_KEYS": f"{FLOOD},{OTHER}"}) as server:
        server.http.headers["x-api-key"] = FLOOD
        for _ in models:
            server.log_line(r"\] ready: process")
        yield server


def sent(server: Server, model: str, prompt: str, key: str = FLOOD) -> socket.socket:
    """Send a request and leave its answer unread."""
    head, body = raw_request(prompt, path=f"/predictions/{model}").split(b"\r\n\r\n")
    return connect(server, b"%b\r\nx-api-key: %b\r\n\r\n%b" % (head, key.encode(), body))


def refused(server: Server, model: str, reason: str) -> int:
    """Return how many requests were refused for a reason."""
    line = re.escape(f'lmi_requests_refused_total{{model="{model}",reason="{reason}"}}') + r" (\d+)"
    found = re.search(line, server.http.get("/metrics").text)
    return int(found[1]) if found else 0


def holding(server: Server, model: str) -> socket.socket:
    """Take the only place of a model until the connection is closed."""
    connection = sent(server, model, "wait")
    server.until("lmi_requests_in_flight", 1, model)
    return connection


def test_a_request_that_would_wait_too_long_is_refused_at_once(server: Server) -> None:
    path = "/predictions/quick"
    first = holding(server, "quick")
    second = sent(server, "quick", "wait")
    server.until("lmi_queue_depth", 1, "quick")  # it may wait, because the rate is not known yet
    time.sleep(1.1)  # by which the first one is known to have taken longer than that
    first.close()
    server.until("lmi_queue_depth", 0, "quick")
    lmi = server.http.post(path, json=request("a"))
    assert (lmi.status_code, lmi.json()["type"]) == (503, "WlmCapacityException")
    assert "option.max_queue_delay_ms=1 " in lmi.json()["message"]
    assert int(lmi.headers["retry-after"]) >= 2
    openai = server.http.post("/v1/chat/completions", json=CHAT)
    assert (openai.status_code, openai.json()["error"]["code"]) == (503, "queue_delay")
    anthropic = server.http.post("/v1/messages", json=CHAT)
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (529, "overloaded_error")
    assert server.metric("lmi_queue_depth", "quick") == 0
    assert refused(server, "quick", "queue_delay") == 3
    second.close()
    server.until("lmi_requests_in_flight", 0, "quick")
    assert server.http.post(path, json=request("a")).status_code == 200


def late(server: Server, headers: dict[str, str], path: str = "/predictions/patient", body: object = None) -> Any:
    """Send a request whose deadline passes while another one has the only place; return the answer."""
    before = refused(server, "patient", "deadline")
    with holding(server, "patient"):
        answer = server.http.post(path, json=body or request("exit"), headers=headers)
        assert server.metric("lmi_queue_depth", "patient") == 0
        assert server.metric("lmi_requests_in_flight", "patient") == 1
    server.until("lmi_requests_in_flight", 0, "patient")
    assert refused(server, "patient", "deadline") == before + 1
    return answer


@pytest.mark.parametrize("name", ["x-request-timeout", "x-stainless-read-timeout", "X-Stainless-Timeout"])
def test_a_request_whose_deadline_passes_in_the_queue_never_reaches_the_worker(server: Server, name: str) -> None:
    answer = late(server, {name: "0.05"})
    assert (answer.status_code, answer.json()["type"]) == (504, "TimeoutException")
    assert f"queue until its deadline ({name.lower()}=0.05 seconds)" in answer.json()["message"]


def test_a_deadline_is_an_error_in_the_form_of_each_api(server: Server) -> None:
    import openai

    headers = {"x-request-timeout": "0.05"}
    chat = {**CHAT, "model": "patient"}
    answer = late(server, headers, "/v1/chat/completions", chat)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    answer = late(server, headers, "/v1/messages", chat)
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
    with (
        holding(server, "patient"),
        openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=FLOOD, max_retries=0) as client,
        pytest.raises(openai.InternalServerError) as raised,
    ):
        client.chat.completions.create(**chat, extra_headers=headers)  # type: ignore[call-overload]
    assert raised.value.status_code == 504
    server.until("lmi_requests_in_flight", 0, "patient")


def test_a_running_request_is_cancelled_at_the_deadline_that_its_client_asked_for(server: Server) -> None:
    headers = {"x-request-timeout": "0.5"}
    answer = server.http.post("/predictions/patient", json=request("wait"), headers=headers)
    assert answer.status_code == 504
    server.until("lmi_requests_in_flight", 0, "patient")
    stream = request("token-then-wait", stream=True)
    answer = server.http.post("/predictions/patient", json=stream, headers=headers)
    assert "deadline (x-request-timeout=0.5 seconds)" in answer.text  # in an event, or after no token in a 504
    server.until("lmi_requests_in_flight", 0, "patient")
    assert server.http.post("/predictions/patient", json=request("a"), headers={"x-request-timeout": "600"}).is_success


@pytest.mark.parametrize("value", ["", "0", "0.0", "-1", "soon", "inf", "1e3", "30s", "1,5", "9" * 40])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(server: Server, value: str) -> None:
    path = "/predictions/patient"
    answers = [
        server.http.post(path, json=request("a"), headers={"x-request-timeout": value}),
        server.http.post(
            path, json=request("a"), headers={"x-amzn-sagemaker-custom-attributes": f"x-request-timeout={value}"}
        ),
        server.http.post(
            "/v1/completions", json={"prompt": "a", "model": "patient"}, headers={"x-request-timeout": value}
        ),
    ]
    for answer in answers:
        assert answer.status_code == 400
        assert f"Header x-request-timeout is '{value}'; send a number of seconds above 0" in answer.text


def test_odd_headers_of_a_client_library_change_nothing(server: Server) -> None:
    for value in ("Timeout(connect=5.0)", "NOT_GIVEN", "None", "-1", "0", "nan", ""):
        headers = {"x-stainless-timeout": value, "x-stainless-read-timeout": value}
        assert server.http.post("/predictions/patient", json=request("a"), headers=headers).status_code == 200


def test_a_key_that_floods_the_queue_gives_way_to_another_one(server: Server) -> None:
    running_one = holding(server, "patient")
    flood = []
    for number in range(1, 5):
        flood.append(sent(server, "patient", "a"))
        server.until("lmi_queue_depth", number, "patient")
    before = refused(server, "patient", "queue_full")
    assert server.http.post("/predictions/patient", json=request("a")).status_code == 503
    other = sent(server, "patient", "b", OTHER)
    assert received(flood[3], b"WlmCapacityException").startswith(b"HTTP/1.1 503 ")
    assert refused(server, "patient", "queue_full") == before + 2
    assert server.metric("lmi_queue_depth", "patient") == 4
    running_one.close()
    for connection in (*flood[:3], other):
        assert received(connection, b"generated_text").startswith(b"HTTP/1.1 200 ")
    for connection in (*flood, other):
        connection.close()


@pytest.mark.parametrize(("headers", "fields"), [({"x-priority": "1"}, {}), ({}, {"priority": -1})])
def test_an_urgent_request_does_not_wait_for_others(
    server: Server, headers: dict[str, str], fields: dict[str, int]
) -> None:
    running_one = holding(server, "patient")
    other = sent(server, "patient", "wait")
    server.until("lmi_queue_depth", 1, "patient")
    with ThreadPoolExecutor(1) as pool:
        chat = {**CHAT, "model": "patient", **fields}
        urgent = pool.submit(server.http.post, "/v1/chat/completions", json=chat, headers=headers)
        server.until("lmi_queue_depth", 2, "patient")
        running_one.close()
        assert urgent.result().status_code == 200  # the other one would never let it have the place
    other.close()
    server.until("lmi_requests_in_flight", 0, "patient")


@pytest.mark.slow
def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    result = uvloop.run(overload.run(1.0))
    assert result.counts.keys() <= {200, 503}
    assert result.refusals
    assert result.kept > 0
    overload.report(result, 1.0)
    printed = capsys.readouterr().out
    rows = (
        "tokens/s, all places",
        "tokens/s under",
        "answers by",
        "ms to a 503",
        "ms to the end",
        "s to rec",
        "ms, longest",
    )
    assert [row for row in rows if row not in printed] == []
