"""A model in asynchronous mode, over HTTP: its answers have the shape of LMI's asynchronous service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from product_helpers import Server, serving

from lmi_server.configuration.resolve import inspect_model

BODY = {"inputs": "one two", "parameters": {"max_new_tokens": 2, "details": True}}
SESSION = "X-Amzn-SageMaker-Session-Id"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("asynchronous")
    options = {"entryPoint": "djl_python.echo", "async_mode": "true", "sessions_path": str(directory / "sessions")}
    with serving(directory, directory, **options) as started:
        yield started


def test_answers_have_the_shape_of_the_service(server: Server) -> None:
    whole = server.http.post("/invocations", json=BODY).json()
    assert whole["generated_text"] == " one two"
    assert whole["details"]["tokens"][0] == {"id": 0, "text": " one", "logprob": 0.0}
    assert (whole["details"]["finish_reason"], whole["details"]["generated_tokens"]) == ("length", 2)
    streamed = server.http.post("/invocations", json={**BODY, "stream": True})
    assert streamed.headers["content-type"] == "application/jsonlines"
    first, last = map(json.loads, streamed.text.splitlines())
    assert first == {
        "index": 0,
        "token": {"id": 0, "text": " one", "logprob": 0.0},
        "generated_text": None,
        "details": None,
    }
    assert last["generated_text"] == " one two"
    assert last["details"] == {"finish_reason": "length", "seed": None, "generated_tokens": 2, "input_length": 2}


def test_openais_routes_keep_their_events(server: Server) -> None:
    chat = {"model": "lmi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stream": True}
    events = server.http.post("/v1/chat/completions", json=chat)
    assert events.headers["content-type"].startswith("text/event-stream")
    assert events.text.endswith("data: [DONE]\n\n")
    lines = server.http.post("/invocations", json=chat)
    assert lines.headers["content-type"] == "application/jsonlines"
    assert all(json.loads(line)["object"] == "chat.completion.chunk" for line in lines.text.splitlines())
    whole = server.http.post("/invocations", json={"prompt": "Hi", "max_tokens": 1}).json()
    assert (whole["object"], whole["model"]) == ("text_completion", "lmi")


def test_sessions_are_on(server: Server) -> None:
    opened = server.http.post("/invocations", json={"requestType": "NEW_SESSION"})
    known = opened.headers[SESSION].partition(";")[0]
    assert server.http.post("/invocations", json=BODY, headers={SESSION: known}).status_code == 200
    unknown = server.http.post("/invocations", json=BODY, headers={SESSION: known[:-4] + "0000"})
    assert (unknown.status_code, "session not found" in unknown.json()["message"]) == (424, True)


@pytest.mark.parametrize(
    ("options", "asynchronous"),
    [
        ({"entryPoint": "djl_python.lmi_vllm.vllm_async_service"}, True),
        ({"async_mode": "true"}, True),
        ({"rolling_batch": "vllm"}, False),
        ({"entryPoint": "djl_python.vllm"}, False),
    ],
    ids=str,
)
def test_what_asks_for_the_service(tmp_path: Path, options: dict[str, str], asynchronous: bool) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    inspected = inspect_model(tmp_path, {}, {f"option.{name}": value for name, value in options.items()})
    assert inspected.options.is_async_service is asynchronous
    assert inspected.options.has_sessions is asynchronous
