"""LoRA adapters of a model.py: the adapter API calls its functions, whatever kind of function serves the requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from own_code_helpers import make_own, serving_own
from server_helpers import Server, running

CODE = Path("adapters")
KINDS = {
    "alone": {},
    "in batches": {"batch_size": 4, "max_batch_delay": 5},
    "asynchronous": {"handler": "handle_async"},
    "step by step": {"handler": "handle_steps", "rolling_batch": "auto"},
}


def make_adapter(directory: Path, greeting: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "greeting").write_text(greeting)
    return directory


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the code on two workers; the adapter "beside" is in the directory of the model."""
    directory = tmp_path_factory.mktemp("adapters")
    model = make_own(directory / "model", CODE, enable_lora="true", minWorkers=2, **request.param)
    make_adapter(model / "adapters" / "beside", "good evening")
    make_adapter(model / "elsewhere", "good morning")
    with running(model, workers=2) as server:
        yield server


def register(server: Server, name: str, source: str = "elsewhere", **more: Any) -> httpx.Response:
    return server.http.post("/models/model/adapters", params={"name": name, "src": source, **more})


def answers(server: Server, adapter: str) -> set[str]:
    """Return the different answers to enough requests that every worker gets one."""
    replies = [server.http.post("/invocations", params={"adapter": adapter}, content="a") for _ in range(8)]
    return {reply.text.strip() if reply.status_code == 200 else str(reply.status_code) for reply in replies}


@pytest.mark.slow
def test_the_functions_are_called_on_every_worker(server: Server) -> None:
    header = {"X-Amzn-SageMaker-Adapter-Alias": "The First"}
    parameters = {"name": "first", "src": "elsewhere", "weight": "0.5", "preload": "false"}
    registered = server.http.post("/adapters", params=parameters, headers=header)
    assert (registered.status_code, registered.json()) == (200, {"status": "The First is there"})
    assert answers(server, "first") == {"good morning"}
    updated = server.http.post("/adapters/first/update", params={"more": "1"})
    assert updated.json() == {"status": "Adapter The First updated"}
    assert answers(server, "first") == {"good morning!"}
    assert server.http.delete("/adapters/first").json() == {"status": "Adapter The First unregistered"}
    assert answers(server, "first") == {"424"}
    calls = server.http.post("/invocations", content="calls").json()
    options = {"weight": "0.5", "preload": "false"}
    assert calls[-3:] == [
        ["register_adapter", "first", options],
        ["update_adapter", "first", {**options, "more": "1"}],
        ["unregister_adapter", "first", {**options, "more": "1"}],
    ]


def test_those_beside_the_model_are_registered_with_it(server: Server) -> None:
    assert answers(server, "beside") == {"good evening"}
    assert answers(server, "") == {"hello"}


def test_what_the_functions_refuse_has_not_happened(server: Server) -> None:
    wrong = register(server, "wrong", source=".")
    assert (wrong.status_code, "no greeting in" in wrong.json()["message"]) == (424, True)
    full = register(server, "full")
    assert (full.status_code, full.json()["message"]) == (507, "no free slots")
    assert register(server, "kept").status_code == 200
    updated = server.http.post("/adapters/kept/update", params={"refuse": "1"})
    assert (updated.status_code, updated.json()["message"]) == (424, "update_adapter_error: it stays as it is")
    assert server.http.delete("/adapters/kept").json()["message"] == "kept adapters stay"
    assert answers(server, "kept") == {"good morning"}
    assert {entry["name"] for entry in server.http.get("/adapters").json()["adapters"]} == {"beside", "kept"}


def test_a_worker_that_starts_later_gets_them_all(server: Server) -> None:
    assert register(server, "later").status_code == 200
    os.kill(server.worker_pid(), signal.SIGKILL)
    server.log_line(r"\] ready: process")
    assert answers(server, "later") == {"good morning"}


def test_a_function_that_ends_its_process_refuses_the_adapter(server: Server) -> None:
    assert register(server, "exit").status_code == 503
    for _ in range(2):
        server.log_line(r"\] ready: process")
    assert answers(server, "beside") == {"good evening"}


def test_code_without_the_functions_takes_none(tmp_path: Path) -> None:
    code = "from djl_python import Output\ndef handle(inputs): return Output().add('a')"
    with serving_own(tmp_path, code, enable_lora="true") as server:
        refused = register(server, "first", source=".")
        assert refused.status_code == 424
        assert "defines no function register_adapter" in refused.json()["message"]
        assert server.http.post("/invocations?adapter=first", content="a").status_code == 424


def test_code_gets_a_source_that_it_fetches_itself_as_it_is(tmp_path: Path) -> None:
    code = (
        "from djl_python import Output\nsources = []\n"
        "def register_adapter(inputs): sources.append(inputs.get_property('src'))\n"
        "def handle(inputs): return Output().add_as_json(sources)"
    )
    with serving_own(tmp_path, code, enable_lora="true") as server:
        for index, source in enumerate(("dummy_weights", "owner/adapter", "tf://anything", ".")):
            assert register(server, f"a{index}", source=source).status_code == 200
        assert server.http.post("/invocations").json() == [
            "dummy_weights", "owner/adapter", "tf://anything", str(tmp_path / "model"),
        ]  # fmt: skip


def test_without_enable_lora_the_parameter_is_the_codes_own(tmp_path: Path) -> None:
    code = "from djl_python import Output\ndef handle(inputs): return Output().add(inputs.get_as_bytes('adapter'))"
    with serving_own(tmp_path, code) as server:
        assert server.http.post("/invocations?adapter=mine", content="a").text == "mine"
        assert register(server, "first", source=".").status_code == 400
