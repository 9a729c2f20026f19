"""Which names in a body's `model` a server takes, and that the front end itself refuses the others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from own_code_helpers import make_own
from server_helpers import FAULTS, Server, make_model, running
from waiting import wait_until

ANSWERS_ANYTHING = """
from djl_python import Output


def handle(inputs):
    return Output().add_as_json({"model": inputs.get_as_json()["model"]}) if inputs.get_content().size() else None
"""
TAKES_ANY_NAME = """
from djl_python.input_parser import input_formatter


@input_formatter
def parse(body: dict) -> dict:
    return {"prompt": body["model"], "max_tokens": 2}
"""
PATHS = ["completions", "chat/completions", "responses", "messages", "messages/count_tokens"]
ADDRESS = "http://127.0.0.1:8080/v1"


def body_for(path: str, model: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "a b"}]
    bodies: dict[str, dict[str, Any]] = {"completions": {"prompt": "a b", "max_tokens": 2}, "responses": {"input": "a"}}
    return {"model": model, **bodies.get(path, {"messages": messages, "max_tokens": 2})}


def ask(server: Server, model: str, path: str = "completions", **headers: str) -> Any:
    return server.http.post(f"/v1/{path}", json=body_for(path, model), headers=headers)


@pytest.fixture(scope="module")
def asleep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a model whose first request starts its worker; so a request that a worker refuses leaves one behind."""
    model = tmp_path_factory.mktemp("asleep") / "model"
    make_model(model, FAULTS, minWorkers=0, maxWorkers=1, served_model_name="alias", enable_lora="true")
    (model / "adapters" / "own").mkdir(parents=True)
    with running(model, variables={"SERVING_ACCESS_LOG": "json"}) as server:
        able = {"model": {"status": "Healthy"}}
        wait_until(lambda: server.http.get("/ping").json() == able, "the model can be asked")
        yield server


@pytest.mark.parametrize("path", PATHS)
def test_the_front_end_refuses_a_wrong_name_before_any_worker_runs(asleep: Server, path: str) -> None:
    reply = ask(asleep, "other", path, **{"x-request-id": f"wrong {path}"})
    assert reply.status_code == 404
    assert 'The model "other" does not exist; served here: model, alias, own' in reply.json()["error"]["message"]
    line = json.loads(asleep.log_line(f'^.*"log":"access".*"id":"wrong {re.escape(path)}".*$')[0])
    assert (line["model"], line["code"], line["error"]) == ("model", 404, "ModelNotFoundError")
    assert workers(asleep) == []


def test_a_wrong_adapter_behind_a_right_name_is_refused_as_well(asleep: Server) -> None:
    reply = ask(asleep, "alias:nobody")
    assert (reply.status_code, workers(asleep)) == (404, [])


def test_a_long_wrong_name_is_cut_in_the_answer(asleep: Server) -> None:
    reply = ask(asleep, "x" * 10_000)
    assert reply.status_code == 404
    assert len(reply.content) < 1000


def workers(server: Server) -> list[Any]:
    return [
        worker
        for element in server.http.get("/models/model").json()
        for model in element["models"]
        for group in model["workerGroups"]
        for worker in group["workers"]
    ]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    """Serve a model with an adapter beside it."""
    model = make_model(store / "model", FAULTS, served_model_name="alias", enable_lora="true")
    (model / "adapters" / "own").mkdir(parents=True)
    with running(model, workers=1) as server:
        yield server


@pytest.mark.parametrize(
    ("name", "shown", "text"),
    [
        ("model", "model", " a b"),
        ("alias", "alias", " a b"),
        ("own", "own", " own: a"),
        ("alias:own", "alias:own", " own: a"),
        ("tgi", "tgi", " a b"),
        (ADDRESS, "model", " a b"),
        ("HTTPS://endpoint.example/with a space", "model", " a b"),
    ],
)
def test_names_that_are_answered(server: Server, name: str, shown: str, text: str) -> None:
    answer = ask(server, name).json()
    assert (answer["model"], answer["choices"][0]["text"]) == (shown, text)


@pytest.mark.parametrize("path", PATHS)
def test_the_address_of_the_server_means_its_only_model(server: Server, path: str) -> None:
    reply = ask(server, f"http://127.0.0.1:{server.port}/v1", path)
    assert reply.status_code == 200, reply.text
    assert str(server.port) not in reply.text


def test_a_chunk_of_a_stream_does_not_repeat_a_long_address(server: Server) -> None:
    body = {**body_for("completions", f"http://{'x' * 5000}"), "stream": True}
    reply = server.http.post("/v1/completions", json=body)
    assert reply.status_code == 200
    assert len(reply.content) < 2000


def test_of_several_models_the_one_of_the_start_is_meant(server: Server, store: Path) -> None:
    make_model(store / "second")
    assert server.http.post("/models", params={"url": str(store / "second")}).status_code == 200
    assert ask(server, ADDRESS).json()["model"] == "model"
    assert ask(server, "second").json()["model"] == "second"
    assert ask(server, "second:nobody").status_code == 404
    assert server.http.delete("/models/second").status_code == 200


def test_a_name_that_is_an_address_wins(tmp_path: Path) -> None:
    for name, alias in (("first", ADDRESS), ("second", "x")):
        make_model(tmp_path / "store" / name, FAULTS, served_model_name=alias)
    with running("--model-store", tmp_path / "store", workers=2) as server:
        assert ask(server, ADDRESS).json()["model"] == ADDRESS
        assert ask(server, "http://another.example").status_code == 404


def test_a_model_that_loads_adapters_on_demand_takes_each_of_its_store(tmp_path: Path) -> None:
    keys = {"enable_lora": "true", "dynamic_lora_loading_path": "stored", "max_num_adapters_per_replica": 2}
    model = make_model(tmp_path / "model", FAULTS, **keys)
    (model / "stored" / "late").mkdir(parents=True)
    with running(model, workers=1) as server:
        assert ask(server, "late").json()["choices"][0]["text"] == " late: a"
        assert ask(server, "model:late").json()["choices"][0]["text"] == " late: a"
        assert ask(server, ADDRESS).json()["choices"][0]["text"] == " a b"
        assert ask(server, "nobody").status_code == 404


@pytest.mark.parametrize(
    ("code", "keys", "answer"),
    [
        (ANSWERS_ANYTHING, {}, '"any name"'),
        (ANSWERS_ANYTHING, {"entryPoint": "djl_python.echo"}, '"any name"'),
        (TAKES_ANY_NAME, {"entryPoint": "djl_python.echo"}, '" any name"'),
    ],
    ids=["own code", "custom handler", "input formatter"],
)
def test_code_of_the_user_reads_any_name(tmp_path: Path, code: str, keys: dict[str, str], answer: str) -> None:
    with running(make_own(tmp_path / "model", code, **keys), workers=1) as server:
        reply = server.http.post("/v1/completions", json={"model": "any name"})
        assert reply.status_code == 200, reply.text
        assert answer in reply.text
