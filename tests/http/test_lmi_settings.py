"""Settings of LMI's front end: statuses of errors, CORS, limits on errors, and models that a request registers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_helpers import Server, connect, make_model, raw_request, request, serving

from frontend.observability.error_rates import ErrorRates
from lmi_server.configuration.server_settings import ErrorRate
from lmi_server.contract.errors import HandlerError, LmiServerError, QueueFullError

CORS = {
    "access-control-allow-origin": "https://a.example",
    "access-control-allow-methods": "POST, GET",
    "access-control-allow-headers": "content-type",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("settings")
    for name in ("allowed/by_header", "allowed/by_query", "other"):
        make_model(directory / name)
    return directory


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    variables = {
        "SERVING_THROTTLE_ERROR_HTTP_CODE": "429",
        "SERVING_WLM_ERROR_HTTP_CODE": "502",
        "SERVING_BAD_REQUEST_ERROR_HTTP_CODE": "422",
        "SERVING_CORS_ALLOWED_ORIGIN": CORS["access-control-allow-origin"],
        "SERVING_CORS_ALLOWED_METHODS": CORS["access-control-allow-methods"],
        "SERVING_CORS_ALLOWED_HEADERS": CORS["access-control-allow-headers"],
        "SERVING_ERROR_RATE_MODEL": "2/PT1H",
        "SERVING_MODEL_URL_PATTERN": f"(file://)?{directory}/allowed/.*",
    }
    with serving(directory, variables=variables, job_queue_size=1, max_rolling_batch_size=1) as server:
        yield server


def test_statuses_of_errors(server: Server) -> None:
    with connect(server, raw_request("wait")):
        server.until("lmi_requests_in_flight", 1)
        with connect(server, raw_request("wait")):
            server.until("lmi_queue_depth", 1)
            full = server.invoke("a")
            full_for_openai = server.http.post("/v1/completions", json={"prompt": "a"})
    assert (full.status_code, full.json()["code"], full.json()["type"]) == (429, 429, "WlmCapacityException")
    assert (full_for_openai.status_code, full_for_openai.json()["error"]["code"]) == (429, "queue_full")
    server.until("lmi_requests_in_flight", 0)
    dead = server.invoke("exit")
    assert (dead.status_code, dead.json()["code"], dead.json()["type"]) == (502, 502, "WlmException")
    assert server.http.post("/models").status_code == 400, "only requests for inference have other statuses"


@pytest.mark.parametrize(("method", "path"), [("POST", "/invocations"), ("GET", "/ping"), ("GET", "/nope")])
def test_cors_headers_are_in_every_answer(server: Server, method: str, path: str) -> None:
    answer = server.http.request(method, path, json=request("a"), headers={"origin": "https://a.example"})
    assert {name: answer.headers.get(name) for name in CORS} == CORS


@pytest.mark.parametrize("path", ["/invocations", "/v1/chat/completions", "/models", "/models/model"])
def test_a_browser_may_ask_first(server: Server, path: str) -> None:
    answer = server.http.options(path, headers={"access-control-request-method": "POST", "origin": "https://a.example"})
    assert (answer.status_code, answer.headers["access-control-allow-methods"]) == (200, "POST, GET")


def test_a_request_registers_a_model_whose_url_is_allowed(server: Server, directory: Path) -> None:
    allowed, other = directory / "allowed", directory / "other"
    body = request("a b")
    by_header = {"model_url": f"file://{allowed}/by_header"}
    assert server.http.post("/predictions/first", json=body).status_code == 404
    for _ in range(2):  # the second time it is registered already
        answer = server.http.post("/predictions/first", json=body, headers=by_header)
        assert (answer.status_code, answer.json()) == (200, {"generated_text": " a b a"})
    query = {"model_name": "second", "model_version": "3", "model_url": str(allowed / "by_query")}
    assert server.http.post("/invocations", params=query, json=body).status_code == 200
    assert server.http.get("/models/second/3").status_code == 200
    refused = server.http.post("/predictions/third", json=body, headers={"model_url": str(other)})
    assert refused.status_code == 404
    assert "does not match the model_url_pattern" in refused.json()["message"]
    for up in ("..", "%2e%2e"):
        climbing = {"model_url": f"file://{allowed}/{up}/other"}
        assert server.http.post("/predictions/third", json=body, headers=climbing).status_code == 404
    missing = server.http.post("/predictions/third", json=body, headers={"model_url": f"{allowed}/nothing"})
    assert missing.status_code == 404
    assert "there is no directory" in missing.json()["message"]
    unnamed = server.http.post("/invocations", json=body)
    assert unnamed.status_code == 200, "the only model of the start stays the default one"
    completion = {"prompt": "a", "max_tokens": 1}
    assert server.http.post("/v1/completions", json={**completion, "model": "tgi"}).status_code == 200
    assert server.http.post("/v1/completions", json={**completion, "model": "gpt"}).status_code == 404
    broken = server.http.post("/invocations", content=b"x", headers={"content-type": "multipart/form-data; boundary=a"})
    assert (broken.status_code, broken.json()["type"]) == (422, "BadRequestException")


def test_too_many_errors_fail_the_health_check(server: Server) -> None:
    for _ in range(2):
        assert server.invoke("raise").status_code == 424
    assert server.http.get("/ping").status_code == 200
    assert server.invoke("raise").status_code == 424
    assert server.http.get("/ping").status_code == 503
    assert server.invoke("a").status_code == 200


@pytest.mark.parametrize(
    ("kind", "status", "error"),
    [
        ("wlm", 429, QueueFullError("full")),
        ("model", 424, HandlerError("raised")),
        ("server", 500, None),
        ("any", 507, LmiServerError("other")),
        ("any", 424, None),
        ("any", 503, QueueFullError("full")),
    ],
)
def test_errors_count_by_kind_and_within_their_time(kind: str, status: int, error: LmiServerError | None) -> None:
    times = iter((0.0, 61.0, 62.0))
    rates = ErrorRates({kind: ErrorRate(1, 60.0), "other": ErrorRate(0, 1.0)}, lambda: next(times))
    rates.count(status, error)
    rates.count(status, error)
    rates.count(200, None)
    rates.count(404, None)
    assert not rates.exceeded
    rates.count(status, error)
    assert rates.exceeded
