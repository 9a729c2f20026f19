"""What the server does with more requests than it can serve: whom it refuses, and who waits for how long."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from server_helpers import Server, connect, make_model, raw_request, request, running

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "model": "quick"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve two models that take one request at a time; "quick" lets none wait once it knows its rate."""
    directory = tmp_path_factory.mktemp("overload")
    slow = {"echo_delay_ms": 20, "max_rolling_batch_size": 1}
    models = [
        make_model(directory / "patient", **slow, job_queue_size=4),
        make_model(directory / "quick", **slow, max_queue_delay_ms=1),
    ]
    with running(*models) as server:
        for _ in models:
            server.log_line(r"\] ready: process")
        yield server


def holding(server: Server, model: str) -> socket.socket:
    """Take the only place of a model until the connection is closed."""
    connection = connect(server, raw_request("wait", path=f"/predictions/{model}"))
    server.until("lmi_requests_in_flight", 1, model)
    return connection


def test_a_request_that_would_wait_too_long_is_refused_at_once(server: Server) -> None:
    path = "/predictions/quick"
    first = holding(server, "quick")
    second = connect(server, raw_request("wait", path=path))
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
    second.close()
    server.until("lmi_requests_in_flight", 0, "quick")
    assert server.http.post(path, json=request("a")).status_code == 200
