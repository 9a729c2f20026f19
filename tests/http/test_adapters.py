"""LMI's adapter API over HTTP: on every worker, on those that start later, by every way to name an adapter."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_helpers import Server, make_model, running, serving

ECHOED = {"inputs": "a b", "parameters": {"max_new_tokens": 2}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a model on two workers; "beside" lies in its directory."""
    directory = tmp_path_factory.mktemp("adapters")
    (directory / "model" / "adapters" / "beside").mkdir(parents=True)
    (directory / "elsewhere").mkdir()
    make_model(directory / "files", enable_lora="true", minWorkers=2, maxWorkers=2, model_loading_timeout=20)
    (directory / "files" / "serving.properties").rename(directory / "model" / "serving.properties")
    with running(directory / "model", workers=2) as server:
        yield server


@pytest.fixture
def source(tmp_path: Path) -> str:
    return str(tmp_path)


def register(server: Server, name: str, source: str, **more: Any) -> httpx.Response:
    return server.http.post("/models/model/adapters", params={"name": name, "src": source, **more})


def answers(server: Server, adapter: str, count: int = 8) -> set[str]:
    """Return what several requests are answered with, so that every worker has had one."""
    headers = {"X-Amzn-SageMaker-Adapter-Identifier": adapter}
    replies = [server.http.post("/invocations", json=ECHOED, headers=headers) for _ in range(count)]
    return {reply.json().get("generated_text", f"{reply.status_code}") for reply in replies}


def test_the_life_of_an_adapter(server: Server, source: str) -> None:
    assert register(server, "first", source).json() == {"status": "Adapter first registered"}
    assert answers(server, "first") == {" first: a"}
    described = {"name": "first", "src": source, "preload": True, "pin": False}
    assert server.http.get("/models/model/adapters/first").json() == described
    assert server.http.get("/adapters/first").json() == described
    updated = server.http.post("/models/model/adapters/first/update", params={"pin": "true"})
    assert updated.json() == {"status": "Adapter first updated"}
    assert server.http.get("/adapters/first").json() == {**described, "pin": True}
    listed = server.http.get("/adapters").json()["adapters"]
    assert [entry["name"] for entry in listed] == ["beside", "first"]
    page = server.http.get("/adapters", params={"limit": 1}).json()
    assert (page["nextPageToken"], [entry["name"] for entry in page["adapters"]]) == ("1", ["beside"])
    assert server.http.delete("/adapters/first").json() == {"status": "Adapter first unregistered"}
    assert answers(server, "first") == {"424"}
    assert server.http.get("/adapters/first").status_code == 404
    assert register(server, "first", source).status_code == 200
    assert server.http.delete("/models/model/adapters/first").status_code == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/models/model/adapters", "/models/nowhere/adapters", "/adapters"])
def test_a_method_that_the_list_does_not_have_is_not_allowed(server: Server, method: str, path: str) -> None:
    """A path of versions, /models/{model}/{version}, is not asked."""
    answer = server.http.request(method, path)
    assert (answer.status_code, answer.json()["type"]) == (405, "MethodNotAllowedException")
    assert answer.headers["allow"] == "GET, POST"


def test_those_beside_the_model_are_there_from_the_start(server: Server) -> None:
    assert answers(server, "beside") == {" beside: a"}
    row = server.http.get("/adapters/beside").json()
    assert row["src"].endswith("model/adapters/beside")


def test_openais_model_names_an_adapter_and_the_list_has_it(server: Server) -> None:
    body = {"model": "beside", "prompt": "a b", "max_tokens": 2}
    answer = server.http.post("/v1/completions", json=body).json()
    assert (answer["model"], answer["choices"][0]["text"]) == ("beside", " beside: a")
    entries = server.http.get("/v1/models").json()["data"]
    assert [(entry["id"], entry.get("parent")) for entry in entries] == [("model", None), ("beside", "model")]
    beside = server.http.get("/v1/models/beside").json()
    assert (beside["parent"], Path(beside["root"]).name) == ("model", "beside")
    assert server.http.post("/v1/completions", json={**body, "model": "nobody"}).status_code == 404


def test_the_list_of_models_has_the_adapters_of_a_store(tmp_path: Path) -> None:
    """Also once one of them is loaded; it makes room for others later."""
    for name in ("red", "blue"):
        (tmp_path / "stored" / name).mkdir(parents=True)
        (tmp_path / "stored" / name / "adapter_config.json").write_text("{}")
    keys = {"dynamic_lora_loading_path": tmp_path / "stored", "served_model_name": "team/model"}
    with serving(tmp_path, enable_lora="true", **keys) as server:
        chat = {"model": "team/model:red", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        for _ in range(2):
            found = server.http.get("/v1/models").json()["data"]
            assert [(entry["id"], entry["parent"]) for entry in found] == [
                ("model", None),
                ("team/model", None),
                ("team/model:blue", "model"),
                ("team/model:red", "model"),
            ]
            assert server.http.post("/v1/chat/completions", json=chat).status_code == 200
        assert server.http.get("/v1/models/team/model:red").json()["parent"] == "model"


def test_one_that_is_not_registered_fails_its_request_alone(server: Server) -> None:
    reply = server.http.post("/invocations?adapter=nobody", json=ECHOED)
    assert reply.status_code == 424
    assert "The adapter nobody has not been registered; registered: beside" in reply.json()["message"]
    assert server.http.post("/invocations?adapter=beside", json=ECHOED).json() == {"generated_text": " beside: a"}


@pytest.mark.parametrize(
    ("parameters", "status", "message"),
    [
        ({"src": "."}, 400, "Parameter name is required."),
        ({"name": "x"}, 400, "Parameter src is required."),
        ({"name": "x", "src": "."} | {"preload": "maybe"}, 400, "Parameter preload"),
        ({"name": "x", "src": ".", "preload": "false", "pin": "true"}, 424, "preload=false is not allowed"),
        ({"name": "a/b", "src": "."}, 400, "no path reaches a name with a slash"),
        ({"name": "model", "src": "."}, 400, "the name of a model"),
        ({"name": "beside", "src": "."}, 409, "Adapter beside is already registered."),
        ({"name": "x", "src": "x" * 300}, 424, "xxx"),
        ({"name": "x", "src": "/no/such/place"}, 424, "/no/such/place"),
        ({"name": "x", "src": "https://example.com/a.zip"}, 424, "https"),
        ({"name": "refuse", "src": "."}, 424, "the adapter is refused"),
        ({"name": "raise", "src": "."}, 424, "RuntimeError: raised while it was loaded"),
        ({"name": "too-big", "src": "."}, 507, "no room for it"),
    ],
)
def test_what_cannot_be_registered(server: Server, parameters: dict[str, str], status: int, message: str) -> None:
    reply = server.http.post("/models/model/adapters", params=parameters)
    assert reply.status_code == status
    assert message in reply.json()["message"]
    assert [entry["name"] for entry in server.http.get("/adapters").json()["adapters"]] == ["beside"]


def test_codes_of_unknown_models_and_adapters(server: Server) -> None:
    assert server.http.get("/models/nobody/adapters").status_code == 404
    for call in (("GET", ""), ("DELETE", ""), ("POST", "/update")):
        assert server.http.request(call[0], f"/models/model/adapters/nobody{call[1]}").status_code == 404


def test_what_one_worker_refuses_no_worker_has(server: Server, source: str) -> None:
    assert register(server, "refuse-second", source).status_code == 424
    assert answers(server, "refuse-second") == {"424"}


def test_the_alias_is_the_name_in_messages(server: Server, source: str) -> None:
    headers = {"X-Amzn-SageMaker-Adapter-Alias": "Shown"}
    reply = server.http.post("/adapters", params={"name": "hidden", "src": source}, headers=headers)
    assert reply.json() == {"status": "Adapter Shown registered"}
    assert server.http.delete("/adapters/hidden").json() == {"status": "Adapter Shown unregistered"}


def test_a_body_of_parameters_and_a_relative_source(server: Server) -> None:
    body = {"name": "json", "src": "adapters/beside", "preload": False}
    assert server.http.post("/adapters", json=body).status_code == 200
    assert server.http.get("/adapters/json").json() == {**body, "pin": False}
    assert server.http.delete("/adapters/json").status_code == 200


@pytest.mark.slow
def test_adapters_outlive_their_workers(tmp_path: Path) -> None:
    """After a worker's death, after a worker was added, and after all of them were retired."""
    with serving(tmp_path, enable_lora="true") as server:
        assert register(server, "kept", str(tmp_path)).status_code == 200
        os.kill(server.worker_pid(), signal.SIGKILL)
        server.log_line(r"\] ready: process")
        assert answers(server, "kept") == {" kept: a"}
        assert server.http.put("/models/model", params={"min_worker": 3, "max_worker": 3}).status_code == 200
        assert answers(server, "kept", 24) == {" kept: a"}
        assert server.http.put("/models/model", params={"min_worker": 0, "max_worker": 0}).status_code == 200
        assert server.http.put("/models/model", params={"min_worker": 1, "max_worker": 1}).status_code == 200
        assert answers(server, "kept") == {" kept: a"}


def test_a_worker_that_dies_of_an_adapter_refuses_it(tmp_path: Path) -> None:
    with serving(tmp_path, enable_lora="true") as server:
        reply = register(server, "exit", str(tmp_path))
        assert (reply.status_code, reply.json()["message"]) == (503, "The worker process ended during add_adapter")
        server.log_line(r"\] ready: process")
        assert answers(server, "exit") == {"424"}


def test_without_enable_lora_nothing_is_registered_and_the_log_says_what_is_ignored(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model")
    (directory / "adapters" / "beside").mkdir(parents=True)
    with running(directory) as server:
        server.log_line("adapters beside are not served; set option.enable_lora=true")
        server.log_line(r"\] ready: process")
        reply = register(server, "x", str(tmp_path))
        assert reply.status_code == 400
        assert reply.json()["message"].startswith("LoRA is not enabled.")


def test_one_beside_the_model_that_cannot_be_loaded_fails_the_model(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", enable_lora="true", adapters="tuned")
    (directory / "tuned" / "refuse").mkdir(parents=True)
    with running(directory) as server:
        server.log_line("could not be loaded: adapter refuse: the adapter is refused")


@pytest.mark.slow
def test_several_models_and_the_short_path(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_model(tmp_path / "store" / name, enable_lora="true")
    with running("--model-store", tmp_path / "store", workers=2) as server:
        short = server.http.post("/adapters", params={"name": "x", "src": str(tmp_path)})
        assert short.status_code == 400
        assert "/models/{model}/adapters" in short.json()["message"]
        long = server.http.post("/models/two/adapters", params={"name": "x", "src": str(tmp_path)})
        assert long.status_code == 200
        body = {"model": "x", "prompt": "a b", "max_tokens": 2}
        assert server.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == " x: a"
        assert server.http.get("/models/one/adapters").json() == {"adapters": []}
