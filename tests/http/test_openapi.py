"""/openapi.json says what the server answers, and the server answers what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_helpers import Server, connect, make_model, received, running

from frontend import app
from frontend.kserve.predictions import PATHS as KSERVE
from frontend.sagemaker.runtime import PATHS as SAGEMAKER
from lmi_server.dialects.lmi import PARAMETERS
from lmi_server.dialects.optional import optional_dialects
from lmi_server.dialects.schemas import components, request_schema

LEFT_OUT = ("/server/logging", "/models/{model}/canary")
"""Paths that end the log of the tests, and that answer when a trial of a new version has ended."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limit = {"SERVING_MAX_REQUEST_SIZE": "4096"}
    with running(make_model(tmp_path_factory.mktemp("openapi") / "model"), variables=limit, workers=1) as server:
        yield server


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/openapi.json").json()
    return found


def operations(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(method, path) for path, methods in document["paths"].items() for method in methods]


@pytest.mark.slow
def test_it_is_a_document_of_openapi(document: dict[str, Any]) -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(document)
    assert document["openapi"].startswith("3.1")
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))
    assert all(operation["summary"] for methods in document["paths"].values() for operation in methods.values())


def test_every_operation_is_answered(server: Server, document: dict[str, Any]) -> None:
    """No path is unknown, and no method is refused. What ends the model or the log of the test is left out."""
    for method, path in operations(document):
        if method == "delete" or path in LEFT_OUT:
            continue
        filled = re.sub("{version}", "1", path).replace("{model}", "model").replace("{adapter}", "none")
        answer = server.http.request(method, filled, json={})
        assert answer.status_code != 405, (method, path)
        assert "Requested resource is not found" not in answer.text, (method, path)


def test_every_route_is_documented(document: dict[str, Any]) -> None:
    """The tables of the front end are in the document, and a path that is in none is refused."""
    inference = {*app.INFERENCE_PATHS, *app._WITH_MODEL, *optional_dialects().paths, *KSERVE, *SAGEMAKER}
    assert inference <= document["paths"].keys()
    assert all("post" in document["paths"][path] for path in inference)
    for path in (
        "/ping",
        "/metrics",
        "/models",
        "/workflows/{model}",
        "/v2/models/{model}/ready",
        "/v1/messages",
        "/docs",
    ):
        assert path in document["paths"]


def test_each_path_takes_only_the_methods_of_the_document(server: Server, document: dict[str, Any]) -> None:
    any_method = {"/ping", "/invocations", "/models/{model}/invoke", "/models/{model}/{version}/invoke"}
    for path, methods in document["paths"].items():
        if path in any_method or path.startswith("/predictions/"):
            continue
        filled = path.replace("{version}", "1").replace("{model}", "model").replace("{adapter}", "none")
        for method in {"get", "post", "put", "patch"} - methods.keys():
            answer = server.http.request(method, filled, json={})
            assert answer.status_code in (404, 405), (method, path, answer.status_code)


def test_sampling_parameters_come_from_their_table(document: dict[str, Any]) -> None:
    properties = document["components"]["schemas"]["Parameters"]["properties"]
    assert properties.keys() <= PARAMETERS.keys()
    assert properties["temperature"] == {"type": "number"}
    assert properties["max_new_tokens"] == {"type": "integer"}
    assert properties["do_sample"] == {"type": "boolean"}
    assert set(properties["stop"]["type"]) == {"string", "array"}
    assert "max_length" not in properties, "it is refused whatever it holds"
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat["properties"]["messages"] == {"type": "array"}
    assert chat["properties"]["logprobs"] == {"type": "boolean"}


def test_every_reference_has_its_schema(document: dict[str, Any]) -> None:
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert named <= document["components"]["schemas"].keys()
    assert components().keys() <= document["components"]["schemas"].keys()
    assert request_schema("score") == {"type": "object"}


def test_errors_have_the_form_of_the_document(server: Server, document: dict[str, Any]) -> None:
    for path, body in (
        ("/v1/completions", {}),
        ("/v1/messages", {}),
        ("/v2/models/model/infer", {}),
        ("/invocations", {}),
        ("/v2/rerank", {}),
    ):
        answer = server.http.post(path, json=body)
        template = path.replace("/models/model/", "/models/{model}/")
        schema = document["paths"][template]["post"]["responses"]["default"]["content"]["application/json"]["schema"]
        properties = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
        assert answer.json().keys() <= properties.keys(), path
        assert isinstance(answer.json()["error"], str) == (properties["error"].get("type") == "string"), path


def test_answers_have_the_types_of_the_document(server: Server, document: dict[str, Any]) -> None:
    for path in (
        "/invocations",
        "/endpoints/{endpoint}/invocations",
        "/endpoints/{endpoint}/invocations-response-stream",
    ):
        answer = server.http.post(path.replace("{endpoint}", "a"), json={"inputs": "a"})
        kinds = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert (answer.status_code, answer.headers["content-type"] in kinds) == (200, True), path


def test_the_page_needs_nothing_else(server: Server) -> None:
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "<code>/v1/chat/completions</code>" in page.text
    assert not re.search(r"<script|src=|href=\"http", page.text)


@pytest.mark.slow
def test_every_answer_has_the_id_of_its_request(server: Server, document: dict[str, Any]) -> None:
    """All paths, each with what it takes and with what it refuses."""
    calls = [
        (method, re.sub("{version}", "1", path).replace("{model}", "model").replace("{adapter}", "none"), {"json": {}})
        for method, path in operations(document)
        if method != "delete" and path not in LEFT_OUT
    ]
    calls += [(method, path, {}) for _, path, _ in calls for method in ("patch", "options", "head")]
    calls += [
        ("get", path, {})
        for path in ("/nowhere", "/v1/nowhere", "/v2/nowhere", "/invocations?a=%zz", "/predictions/none")
    ]
    posts = [path for method, path, _ in calls if method == "post"]
    calls += [("post", path, {"content": b"x" * 5000}) for path in posts]
    calls += [("post", path, {"content": b"x", "headers": {"content-encoding": "br"}}) for path in posts]
    streamed = {"inputs": "a b", "parameters": {"max_new_tokens": 2}, "stream": True}
    chat = {"model": "model", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}
    bodies = [
        ("/invocations", streamed),
        ("/generate_stream", streamed),
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
    ]
    bodies += [("/v2/models/model/generate_stream", {"text_input": "a", "max_tokens": 2})]
    calls += [("post", path, {"json": body}) for path, body in bodies]
    statuses = set()
    for number, (method, path, more) in enumerate(calls):
        sent = f"id-{number}"
        headers = {"x-request-id": sent, **more.pop("headers", {})}
        answer = server.http.request(method, path, headers=headers, **more)
        statuses.add(answer.status_code)
        assert answer.headers.get_list("x-request-id") == [sent], (method, path, answer.status_code)
    assert statuses >= {200, 400, 404, 405, 413, 415, 424}
    made = [server.http.get(path).headers["x-request-id"] for path in ("/ping", "/nowhere", "/v1/models")]
    assert len(set(made)) == 3


@pytest.mark.parametrize(
    "data", [b"\x00\x01\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"]
)
def test_what_is_no_request_has_an_id_too(server: Server, data: bytes) -> None:
    with connect(server, data) as connection:
        head = received(connection).partition(b"\r\n\r\n")[0].lower()
    assert b"\r\nx-request-id: " in head, head


@pytest.mark.slow
def test_management_is_documented_where_it_is(tmp_path: Path) -> None:
    with running(make_model(tmp_path / "model"), variables={"SERVING_MANAGEMENT_PORT": "0"}) as server:
        management = server.log_line(r"listening on (http://\S+) for management")[1]
        assert "/models" not in server.http.get("/openapi.json").json()["paths"]
        paths = httpx.get(f"{management}/openapi.json").json()["paths"]
        assert "/models" in paths
        assert "/invocations" not in paths
