"""/openapi.json says what the server answers, and the server answers what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_helpers import Server, make_model, running

from frontend import app
from lmi_server.dialects.lmi import PARAMETERS
from lmi_server.dialects.schemas import components, request_schema


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(make_model(tmp_path_factory.mktemp("openapi") / "model")) as server:
        server.log_line(r"\] ready: process")
        yield server


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/openapi.json").json()
    return found


def operations(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(method, path) for path, methods in document["paths"].items() for method in methods]


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
        if method == "delete" or path == "/server/logging":
            continue
        filled = re.sub("{version}", "1", path).replace("{model}", "model").replace("{adapter}", "none")
        answer = server.http.request(method, filled, json={})
        assert answer.status_code != 405, (method, path)
        assert "Requested resource is not found" not in answer.text, (method, path)


def test_every_route_is_documented(document: dict[str, Any]) -> None:
    """The tables of the front end are in the document, and a path that is in none is refused."""
    assert app._INFERENCE.keys() <= document["paths"].keys()
    assert all("post" in document["paths"][path] for path in app._INFERENCE)
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
    ):
        answer = server.http.post(path, json=body)
        template = path.replace("/models/model/", "/models/{model}/")
        schema = document["paths"][template]["post"]["responses"]["default"]["content"]["application/json"]["schema"]
        properties = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
        assert answer.json().keys() <= properties.keys(), path
        assert "error" in answer.json()


def test_the_page_needs_nothing_else(server: Server) -> None:
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "<code>/v1/chat/completions</code>" in page.text
    assert not re.search(r"<script|src=|href=\"http", page.text)


def test_management_is_documented_where_it_is(tmp_path: Path) -> None:
    with running(make_model(tmp_path / "model"), variables={"SERVING_MANAGEMENT_PORT": "0"}) as server:
        management = server.log_line(r"listening on (http://\S+) for management")[1]
        assert "/models" not in server.http.get("/openapi.json").json()["paths"]
        paths = httpx.get(f"{management}/openapi.json").json()["paths"]
        assert "/models" in paths
        assert "/invocations" not in paths
