"""The access log: what a line says of a request, in JSON and as text, and what no line ever says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from server_helpers import Server, make_model, running

KEY = "client-key-0123456789"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve one model with an adapter, an API key, and every log in JSON."""
    model = make_model(tmp_path_factory.mktemp("logged") / "model", enable_lora="true")
    (model / "adapters" / "own").mkdir(parents=True)
    variables = {
        "SERVING_ACCESS_LOG": "json",
        "SERVING_LOG_FORMAT": "json",
        "SERVING_LOG_PROMPTS": "true",
        "SERVING_API_KEYS": KEY,
        "SERVING_EMF_NAMESPACE": "Models",
    }
    with running(model, variables=variables) as server:
        server.http.headers["x-api-key"] = KEY
        server.log_line(r"ready: process")
        yield server


def line_of(server: Server, request_id: str) -> dict[str, Any]:
    found = server.log_line(f'^.*"log":"access".*"id":"{re.escape(request_id)}".*$')
    return dict(json.loads(found[0]))


def test_a_line_of_an_answer(server: Server) -> None:
    body = {"model": "own", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 4}
    headers = {"x-request-id": "the-answer", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    assert server.http.post("/v1/chat/completions?token=in-the-query", json=body, headers=headers).status_code == 200
    line = line_of(server, "the-answer")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert 0 < line.pop("queue_ms") < line.pop("ttft_ms") < line.pop("duration_ms")
    assert json.loads(line.pop("prompt")) == body
    assert line == {
        "log": "access",
        "id": "the-answer",
        "model": "model",
        "route": "chat/completions",
        "code": 200,
        "client": "127.0.0.1",
        "prompt_tokens": 3,
        "output_tokens": 4,
        "finish_reason": "length",
        "adapter": "own",
        "trace_id": TRACE,
    }


@pytest.mark.parametrize(
    ("path", "body", "headers", "code", "model", "error"),
    [
        ("/invocations", b'{"inputs": "raise"}', {}, 424, "model", ""),
        ("/predictions/other", b"{}", {}, 404, "", "ModelNotFoundError"),
        ("/invocations", b"{}", {"x-api-key": "no-key-of-this-server"}, 401, "", "AuthenticationError"),
        ("/invocations", b'{"inputs": "a"}', {"x-request-timeout": "0.000001"}, 504, "model", "DeadlineError"),
    ],
)
def test_what_fails_has_a_line_too(
    server: Server, path: str, body: bytes, headers: dict[str, str], code: int, model: str, error: str
) -> None:
    request_id = f"fails-with-{code}"
    answer = server.http.post(path, content=body, headers={"x-request-id": request_id, **headers})
    line = line_of(server, request_id)
    assert (answer.status_code, line["code"], line["model"], line.get("error", "")) == (code, code, model, error)


def test_no_line_has_a_secret_or_a_control_character(server: Server) -> None:
    prompt = f"\x1b[2J {KEY} https://bucket.s3.amazonaws.com/x?X-Amz-Signature=abcdef0123 https://me:hidden@host/"
    request_id = f"id-{KEY}-\x9b2J"
    server.http.post("/invocations", json={"inputs": prompt}, headers={"x-request-id": request_id.encode("latin-1")})
    server.http.post("/nowhere?api_key=in-the-query")
    server.http.post("/invocations", json={"inputs": "a"}, headers={"x-request-id": "the-last"})
    line_of(server, "the-last")
    text = "".join(server.lines)
    assert "id-***-" in text
    assert not [secret for secret in (KEY, "abcdef0123", "hidden", "in-the-query") if secret in text]
    assert text.replace("\n", "").isprintable()


def test_the_servers_own_lines_are_json_too(server: Server) -> None:
    own = [json.loads(line) for line in server.lines if not re.search(r"^(FORKED|$)", line)]
    ready = next(line for line in own if "ready: process" in line.get("message", ""))
    assert (ready["log"], ready["level"], ready["logger"]) == ("server", "INFO", "lmi_server.serving.pool.membership")
    assert ready["time"].endswith("+00:00")


def test_the_last_lines_and_cloudwatchs_metrics_are_written_at_the_end(server: Server) -> None:
    """This test comes last: it ends the server."""
    server.http.post("/invocations", json={"inputs": "a"}, headers={"x-request-id": "before-the-end"})
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.lines]
    assert "before-the-end" in {line.get("id") for line in lines}
    [line] = [line for line in lines if "_aws" in line]
    [described] = line["_aws"]["CloudWatchMetrics"]
    assert (described["Namespace"], described["Dimensions"], line["Model"]) == ("Models", [["Model"]], "model")
    assert {metric["Name"] for metric in described["Metrics"]} == line.keys() - {"_aws", "Model"}
    assert line["Requests"] > line["ServerErrors"] >= 1
    assert line["TimeToFirstTokenP99"] > 0


def test_as_text_with_samples(tmp_path: Any) -> None:
    variables = {"SERVING_ACCESS_LOG": "text", "SERVING_ACCESS_LOG_SAMPLE": "0"}
    with running(make_model(tmp_path / "model"), variables=variables, workers=1) as server:
        server.invoke("a", headers={"x-request-id": "left-out"})
        server.invoke("raise", headers={"x-request-id": "kept"})
        server.log_line(r"^\S+Z access 127\.0\.0\.1 invocations 424 [\d.]+ms id=kept model=model queue_ms=[\d.]+$")
        assert server.stop() == 0
        assert not [line for line in server.lines if "left-out" in line]
